"""Public methods of a class as tools; without heavy imports, because worker processes use this file."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

HOOKS = ("reward", "done", "close")  # methods that StatefulTools calls, which are not tools


def tool_methods(owner: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that are tools, by name, in the order of their definitions.

    Methods whose name begins with ``_``, and ``reward``, ``done`` and ``close``, are not tools.

    Args:
        owner: class; methods of its base classes are tools, too.
    """
    names = dict.fromkeys(name for base in reversed(owner.__mro__) for name in vars(base))
    methods = {name: getattr(owner, name) for name in names if not name.startswith("_") and name not in HOOKS}
    return {name: method for name, method in methods.items() if isinstance(method, types.FunctionType)}


def without_self(owner: type) -> list[Callable[..., Any]]:
    """Return the methods of a class that are tools, without their argument ``self``, for schemas."""
    is_static = {
        name for base in owner.__mro__ for name, member in vars(base).items() if isinstance(member, staticmethod)
    }
    return [
        method if name in is_static else types.MethodType(method, owner) for name, method in tool_methods(owner).items()
    ]
