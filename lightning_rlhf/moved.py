"""New names of modules and classes that were moved, for the messages about old ones in configurations and programs."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from lightning_rlhf.expected_errors import MissingPackageError


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


class MovedModules(MetaPathFinder):
    """Gives the new name in the error about the import of a module that was moved."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Raise ModuleNotFoundError for an old name; other modules are not found here."""
        if fullname.startswith("lightning_rlhf.") and (now := new_name(fullname)) is not None:
            raise MissingPackageError(f"{fullname} is now {now}", name=fullname)


sys.meta_path.append(MovedModules())
