"""Base of the strategies for several processes: reductions and gathers over the data ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.strategies.failure import EndsTogether
from lightning_rlhf.strategies.roles import RoleStrategy


class ProcessRanks(DataRanks):
    """The data ranks of a torch.distributed process group.

    Args:
        rank: position of this process, in [0, size).
        size: number of processes.
        device: device of the tensors that are exchanged.
        group: process group; None is the default one.
    """

    def __init__(self, rank: int, size: int, device: torch.device, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.group = group

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over the ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        reduced = value.detach().to(self.device, copy=True)
        dist.all_reduce(reduced, operation, group=self.group)
        return reduced.to(value.device)

    def gather(self, value: Tensor) -> Tensor:
        """Return the rows of all ranks; see :meth:`DataRanks.gather`."""
        shapes = [torch.zeros(value.ndim, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(shapes, torch.tensor(value.shape, device=self.device), group=self.group)
        largest = torch.stack(shapes).amax(0).tolist()
        # Not every version of gloo and NCCL supports bool.
        plain = value.to(torch.uint8) if value.dtype == torch.bool else value
        padded = torch.zeros(largest, dtype=plain.dtype, device=self.device)
        padded[tuple(slice(size) for size in value.shape)] = plain.to(self.device)
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded, group=self.group)
        rows = torch.cat([part[: int(shape[0])] for part, shape in zip(parts, shapes, strict=True)])
        return rows.to(value.device, value.dtype)


class DistributedRoles(EndsTogether, RoleStrategy):
    """Base of the strategies for several processes: reduces over data ranks; one failing rank ends all."""

    @property
    def data_ranks(self) -> DataRanks:  # type: ignore[override]
        """The data ranks, as seen from this process."""
        return ProcessRanks(self.global_rank, self.world_size, self.root_device)  # type: ignore[attr-defined]

    @property
    def gradient_scale(self) -> float:  # type: ignore[override]
        """Number of data ranks: the reduction averages gradients, but the losses must be summed."""
        return float(self.data_ranks.size)
