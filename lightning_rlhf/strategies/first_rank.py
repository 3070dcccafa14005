"""Load a model on rank 0 only: other ranks build it on the meta device and receive its tensors by broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import ranks


def shapes_of(build: Callable[[], nn.Module]) -> Any:
    """Build a model on the meta device.

    Args:
        build: factory of the model.
    """
    with torch.device("meta"):
        return build()


def loaded_by_first_rank(name: str, bare: nn.Module, build: Callable[[], nn.Module]) -> Any:
    """Return the loaded model on rank 0 and the meta model with equal dtypes on other ranks. All ranks.

    Args:
        name: name of the role.
        bare: result of :func:`shapes_of`.
        build: factory of the model, called on rank 0 only.

    Raises:
        OSError, ValueError: rank 0 could not load the model, or its tensors differ from those of ``bare``.
    """
    role = ranks.raise_on_all_ranks(lambda: _like(bare, build(), name) if ranks.rank() == 0 else bare)
    types = ranks.on_first_rank(lambda: {key: tensor.dtype for key, tensor in _tensors(role)})
    for key, tensor in _tensors(role):
        if tensor.is_meta:  # loaded weights may have another dtype than the configuration
            tensor.data = tensor.data.to(types[key])
    return role


def from_first_rank(tensor: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's tensor to the device of every rank. All ranks.

    Args:
        tensor: tensor of rank 0; other ranks pass one of the same shape and dtype, whose values are not read.
        device: device of this rank.
    """
    if ranks.rank() == 0:
        whole = tensor.detach().to(device).contiguous()
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # as bytes, because backends support few dtypes
    return whole


def _like(bare: nn.Module, loaded: nn.Module, name: str) -> nn.Module:
    """Return the loaded role after checking that it has the same tensors as the meta model."""
    different = sorted(_layout(loaded) ^ _layout(bare))
    if different:
        raise UsageError(
            f"the {name} loaded on rank 0 must have the same tensors as the model built from its configuration on the "
            f"other ranks, but these differ: {'; '.join(different[:3])}"
        )
    return loaded


def _layout(role: nn.Module) -> set[str]:
    """Return a line per tensor with its name, shape, ``requires_grad`` and the tensor to which it is tied."""
    first: dict[Tensor, str] = {}
    return {
        f"{name} {tuple(tensor.shape)} with{'' if tensor.requires_grad else 'out'} gradient"
        + (f", tied to {first[tensor]}" if first.setdefault(tensor, name) != name else "")
        for name, tensor in _tensors(role)
    }


def _tensors(role: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and buffers; a tied tensor is repeated under each name."""
    yield from role.named_parameters(remove_duplicate=False)
    yield from role.named_buffers(remove_duplicate=False)
