"""Iterators over a model's parameters and persistent buffers, and layers that store their weights in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor, nn

Quantization = Literal["nf4", "int8"]  # what the extra ``quantization`` offers


class StoredLinear(nn.Linear):
    """A frozen linear layer whose ``weight`` has the numbers of another form, such as 4 bits."""

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the (out_features, in_features) weight.

        Args:
            dtype: its dtype; None is that of the layer before it was quantized.
        """
        raise NotImplementedError


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, StoredLinear]]:
    """Yield the quantized layers of a model with the names of their weights."""
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear):
            yield f"{name}.weight", module


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters, quantized ones dequantized one at a time. Tied ones are yielded once.

    Args:
        model: unsharded model.
    """
    layers = dict(quantized_layers(model))
    for name, parameter in model.named_parameters():
        yield name, layers[name].dequantized() if name in layers else parameter.detach()


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


def count_parameters(model: nn.Module, trained: bool = False) -> int:
    """Count the parameters of a model, all shards together, quantized ones by the size of the layer.

    Args:
        model: model, which ZeRO-3 may have sharded.
        trained: whether to count only parameters with a gradient.
    """
    sizes = {name: layer.in_features * layer.out_features for name, layer in quantized_layers(model)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or not trained]
    return sum(sizes.get(name) or getattr(p, "ds_numel", p.numel()) for name, p in named)
