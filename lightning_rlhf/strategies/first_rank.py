"""A model that rank 0 alone loads; the others begin with its shapes and receive its tensors one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import ranks


def shapes_of(build: Callable[[], nn.Module]) -> Any:
    """Build the model on the meta device, without weights.

    Args:
        build: factory of the model.
    """
    with torch.device("meta"):
        return build()


def loaded_by_first_rank(name: str, bare: nn.Module, build: Callable[[], nn.Module]) -> Any:
    """Return the model with its weights on rank 0, and without them elsewhere, with the same dtypes. All ranks.

    Args:
        name: name of the role.
        bare: result of :func:`shapes_of`.
        build: loads or makes the model; called on rank 0 alone.

    Raises:
        OSError, ValueError: rank 0 could not load it, or its tensors differ from its configuration.
    """
    role = ranks.raise_on_all_ranks(lambda: _like(bare, build(), name) if ranks.rank() == 0 else bare)
    types = ranks.on_first_rank(lambda: {key: tensor.dtype for key, tensor in _tensors(role)})
    for key, tensor in _tensors(role):
        if tensor.is_meta:  # some weights are loaded in another dtype than the configuration's
            tensor.data = tensor.data.to(types[key])
    return role


def from_first_rank(tensor: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's tensor to the device of every rank. All ranks.

    Args:
        tensor: tensor of rank 0; elsewhere only shape and dtype are used.
        device: device of this rank.
    """
    if ranks.rank() == 0:
        whole = tensor.detach().to(device).contiguous()
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # bytes: not every type is known to every backend
    return whole


def _like(bare: nn.Module, loaded: nn.Module, name: str) -> nn.Module:
    """Return the loaded role if it has the same tensors as the bare one of other ranks."""
    different = sorted(_layout(loaded) ^ _layout(bare))
    if different:
        raise UsageError(
            f"the {name} must have the same tensors where its weights are loaded (rank 0) as where its configuration "
            f"alone is read (all others), but these differ: {'; '.join(different[:3])}"
        )
    return loaded


def _layout(role: nn.Module) -> set[str]:
    """Return names, shapes and ties of tensors, which must be equal on all ranks."""
    first: dict[Tensor, str] = {}
    return {
        f"{name} {tuple(tensor.shape)} with{'' if tensor.requires_grad else 'out'} gradient"
        + (f", tied to {first[tensor]}" if first.setdefault(tensor, name) != name else "")
        for name, tensor in _tensors(role)
    }


def _tensors(role: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, tied ones under every name."""
    yield from role.named_parameters(remove_duplicate=False)
    yield from role.named_buffers(remove_duplicate=False)
