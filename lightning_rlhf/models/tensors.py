"""A model's parameters, and the buffers that are saved with them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the buffers that are saved with a model, such as the biases of DeepSeek-V3's routers.

    Others, such as rotary frequencies, are computed from the configuration.
    """
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer.detach()


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters, tied ones once, then of the buffers that are saved with them.

    Args:
        model: unsharded model.
    """
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    yield from persistent_buffers(model)
