"""Gathering of sharded tensors on the ranks that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def start_gathering(shards: DTensor, receivers: Sequence[int] | None = None) -> Callable[[], Tensor]:
    """Start to gather a tensor; return a function that waits for it and returns it. All ranks, in the same order.

    Args:
        shards: tensor of which each rank has a part, in the order of FSDP2: of the mesh dimensions that split one
            dimension of the tensor, the last one splits it first.
        receivers: ranks that receive the tensor, at most one of each group with all parts, because a group sends to one
            receiver after the other. The other ranks get a tensor without values, on the meta device, of the same shape
            and dtype. None: all ranks receive it.
    """
    mesh = shards.device_mesh
    if receivers is None:
        gathered = shards.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True).to_local()
        return partial(_arrived, gathered)
    # A tensor that tensor parallelism does not split has several meshes, each with a copy of all parts.
    started = [_start_sending(shards, receiver) for receiver in receivers if receiver in mesh.mesh]

    def finish() -> Tensor:
        tensors = [tensor for wait in started if (tensor := wait()) is not None]
        return tensors[0] if tensors else torch.empty(shards.shape, dtype=shards.dtype, device="meta")

    return finish


def _arrived(tensor: Tensor) -> Tensor:
    """Return a tensor that was gathered asynchronously, after its arrival; on a GPU, the stream waits for it."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def _start_sending(shards: DTensor, receiver: int) -> Callable[[], Tensor | None]:
    """Start to gather a tensor on one rank; return a function that waits, and returns the tensor on that rank.

    The ranks of each mesh dimension in turn send their parts to the one that has the receiver's position in it; those
    that have sent are done. Replicas of the receiver's group do not take part.

    Args:
        shards: argument of :func:`start_gathering`.
        receiver: rank that receives the tensor.
    """
    mesh, placements = shards.device_mesh, shards.placements
    position = mesh.get_coordinate()
    (target,) = (mesh.mesh == receiver).nonzero().tolist()
    assert position is not None
    if any(p.is_replicate() and position[axis] != target[axis] for axis, p in enumerate(placements)):
        return lambda: None
    wait: Callable[[], Tensor | None] = shards.to_local
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        part = wait()
        if part is None:
            return lambda: None
        dim: int = placement.dim  # type: ignore[attr-defined]
        later = range(axis + 1, mesh.ndim)
        count = shards.shape[dim]
        for other in later:
            if not placements[other].is_replicate() and placements[other].dim == dim:  # type: ignore[attr-defined]
                count = _share(count, mesh.size(other), position[other])
        wait = _start_stage(part, dim, count, mesh.get_group(axis), target[axis])
    return wait


def _start_stage(part: Tensor, dim: int, count: int, group: Any, receiver: int) -> Callable[[], Tensor | None]:
    """Start to gather the parts of a group; return a function that waits, and returns their sequence on the receiver.

    Args:
        part: this rank's part, empty on ranks for which none is left.
        dim: dimension that is split.
        count: size of the dimension of all parts together.
        group: process group.
        receiver: receiver's position in the group.
    """
    size = group.size()
    rows = -(-count // size)
    sent = part.detach().movedim(dim, 0).contiguous()
    if len(sent) < rows:  # all parts of a collective have one shape
        sent = torch.cat([sent, sent.new_zeros(rows - len(sent), *sent.shape[1:])])
    received = sent.new_empty(rows * size, *sent.shape[1:]) if group.rank() == receiver else None
    parts = None if received is None else list(received.chunk(size))
    work = dist.gather(sent, parts, group=group, group_dst=receiver, async_op=True)
    assert work is not None

    def finish() -> Tensor | None:
        work.wait()
        return None if received is None else received[:count].movedim(0, dim)

    return finish


def _share(count: int, size: int, position: int) -> int:
    """Return the number of elements of one of ``size`` parts, as ``torch.chunk`` divides ``count``."""
    rows = -(-count // size)
    return max(min(rows, count - rows * position), 0)
