"""Layers of a model, the units that are gathered when it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from torch import nn


def layers(model: nn.Module, wanted: Callable[[str], bool] | None = None) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield named parameters, tied ones once: those of a repeated block together, others separately.

    Args:
        model: model, sharded or not.
        wanted: filter of names; None yields all.
    """
    lists = {f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}

    def block(item: tuple[str, nn.Parameter]) -> str:
        name = item[0]
        inside = min((prefix for prefix in lists if name.startswith(prefix)), key=len, default=None)
        return name if inside is None else inside + name.removeprefix(inside).split(".")[0]

    named = (item for item in model.named_parameters() if wanted is None or wanted(item[0]))
    for _, parameters in groupby(named, block):
        yield list(parameters)
