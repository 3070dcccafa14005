"""Functions by reference: ``package.module.name``, ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_FORMS = "'package.module:function' or 'path/to/file.py:function'"


def load_function(reference: str) -> Callable[..., Any]:
    """What a reference names.

    Args:
        reference: ``module:name``, ``module.name`` or ``file.py:name``; a file is looked for from the current folder.

    Raises:
        ValueError: it names nothing that can be called; the message says what it could have meant.
    """
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, _, name = reference.rpartition(".")
    if not place or not name or (not colon and name == "py"):
        raise ValueError(f"a function is given as {_FORMS}, got {reference!r}")
    module = _load_file(Path(place).expanduser()) if place.endswith(".py") or os.sep in place else _load_module(place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)  # some packages import what they have only when it is asked for
        except AttributeError as error:
            known = [own for own in dir(found) if not own.startswith("_")]
            raise ValueError(f"{part!r} was not found in {place}{_meant(part, known)}") from error
        except ImportError as error:
            raise ValueError(f"{part} in {place} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} in {place} is no function: it is {type(found).__name__} {found!r}")
    return found


def _load_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"{name} cannot be imported: {error}") from error  # something that it imports is missing
        raise ValueError(
            f"there is no module {error.name!r} to import {name} from; a function in a file is given as "
            f"path/to/file.py:function"
        ) from error
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent
        near = _meant(path.name, [file.name for file in folder.glob("*.py")]) if folder.is_dir() else ""
        raise ValueError(
            f"there is no file {path}{near}" + ("" if path.is_absolute() else f" (looked in {Path.cwd()})")
        )
    path = path.resolve()
    # The name is the same in every process, so that what the file defines can be sent from one to another.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file: its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _meant(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; available: {', '.join(sorted(known)[:8])}" if known else ""
