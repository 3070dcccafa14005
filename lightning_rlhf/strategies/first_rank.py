"""A model that rank 0 alone loads; the others begin with its shapes and receive its tensors one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.strategies import ranks


def shapes_of(build: Callable[[], nn.Module]) -> Any:
    """The model without any weights.

    Args:
        build: loads or makes it.
    """
    with torch.device("meta"):
        return build()


def loaded_by_first_rank(name: str, bare: nn.Module, build: Callable[[], nn.Module]) -> Any:
    """The model with its weights on rank 0, and elsewhere what it is without them, in the same types. All ranks.

    Args:
        name: of the role.
        bare: what :func:`shapes_of` gave.
        build: loads or makes the model; called on rank 0 alone.

    Raises:
        OSError, ValueError: rank 0 could not load it, or it is not what its configuration says.
    """
    role = ranks.raise_on_all_ranks(lambda: _like(bare, build(), name) if ranks.rank() == 0 else bare)
    types = ranks.on_first_rank(lambda: {key: tensor.dtype for key, tensor in _tensors(role)})
    for key, tensor in _tensors(role):
        if tensor.is_meta:  # loading keeps some weights in another type than a configuration says
            tensor.data = tensor.data.to(types[key])
    return role


def from_first_rank(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's tensor, on every rank's own device. All ranks.

    Args:
        tensor: of rank 0; elsewhere only its shape and type are read.
        device: of this rank.
    """
    if ranks.rank() == 0:
        whole = tensor.detach().to(device).contiguous()
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # bytes: not every type is known to every backend
    return whole


def _like(bare: nn.Module, loaded: nn.Module, name: str) -> nn.Module:
    """The loaded role, which has the same tensors as the bare one that other ranks have."""
    different = sorted(_layout(loaded) ^ _layout(bare))
    if different:
        raise ValueError(
            f"the {name} must have the same tensors where its weights are loaded (rank 0) as where its configuration "
            f"alone is read (all others), but these differ: {'; '.join(different[:3])}"
        )
    return loaded


def _layout(role: nn.Module) -> set[str]:
    """What must be the same on all ranks before weights are sent: names, shapes, and what is tied to what."""
    first: dict[Tensor, str] = {}
    return {
        f"{name} {tuple(tensor.shape)} with{'' if tensor.requires_grad else 'out'} gradient"
        + (f", tied to {first[tensor]}" if first.setdefault(tensor, name) != name else "")
        for name, tensor in _tensors(role)
    }


def _tensors(role: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under every name."""
    yield from role.named_parameters(remove_duplicate=False)
    yield from role.named_buffers(remove_duplicate=False)
