"""Iterators over a model's parameters and persistent buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from torch import Tensor, nn

from lightning_rlhf.models.quantized import whole_parameters


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the buffers in a model's ``state_dict``, such as DeepSeek-V3's router biases."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer.detach()


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters, dequantized, then of persistent buffers. Tied ones are yielded once.

    Args:
        model: unsharded model.
    """
    yield from whole_parameters(model)
    yield from persistent_buffers(model)


def layers(model: nn.Module, wanted: Callable[[str], bool] | None = None) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield lists of named parameters: one list per repeated block, one per other parameter. Tied ones occur once.

    Args:
        model: model, sharded or not.
        wanted: predicate on names; None yields all.
    """
    lists = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}

    def block(item: tuple[str, nn.Parameter]) -> str:
        name = item[0]
        inside = min((prefix for prefix in lists if name.startswith(prefix)), key=len, default=None)
        if inside is None:
            return name
        return inside + name.removeprefix(inside).split(".")[0]

    named = (item for item in model.named_parameters() if wanted is None or wanted(item[0]))
    for _, parameters in groupby(named, block):
        yield list(parameters)
