"""What a model is made of: its parameters, and the buffers that its files hold beside them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the buffers that are saved with a model, such as what DeepSeek-V3 adds to its routers' scores.

    Others, such as rotary frequencies, follow from the configuration.
    """
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer.detach()


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all parameters, tied ones once, then of the buffers that are saved with them.

    Args:
        model: as a whole in this process.
    """
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    yield from kept_buffers(model)
