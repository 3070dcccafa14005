"""The layers of a model: what is brought together at a time when it is spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from torch import nn


def layers(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Named parameters, tied ones once: all of a repeated block together, any other by itself."""
    lists = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}

    def block(item: tuple[str, nn.Parameter]) -> str:
        name = item[0]
        inside = min((prefix for prefix in lists if name.startswith(prefix)), key=len, default=None)
        return name if inside is None else inside + name.removeprefix(inside).split(".")[0]

    for _, parameters in groupby(model.named_parameters(), block):
        yield list(parameters)
