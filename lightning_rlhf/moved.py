"""New names of modules that were moved, for the messages about configurations that have the old ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path


@cache
def moved_modules() -> dict[str, str]:
    """Return the old and new names of moved modules, which ``moved.json`` lists."""
    table: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table


def new_name(path: str) -> str | None:
    """Return the name that a moved class, function or module has now; None if it was not moved.

    Args:
        path: dotted name, or the reference ``module:function`` of a function.
    """
    module = path.partition(":")[0]
    while module:
        if module in moved_modules():
            return moved_modules()[module] + path[len(module) :]
        module = module.rpartition(".")[0]
    return None
