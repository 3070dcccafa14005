"""Functions of users: their import by reference, and their arguments.

A reference is ``package.module.name``, ``package.module:name`` or ``path/to/file.py:name``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.moved import new_name


def load_function(reference: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        reference: ``module:name``, ``module.name`` or ``file.py:name``; relative paths start at the working directory,
            or at a folder of ``sys.path``, which contains those of the configurations.

    Raises:
        ValueError: the function was not found or is not callable; the message suggests similar names.
    """
    source, colon, name = reference.rpartition(":")
    if not colon:
        source, _, name = reference.rpartition(".")
    if not source or not name or (not colon and name == "py"):
        raise UsageError(
            f"specify a function as 'package.module:function' or 'path/to/file.py:function', got {reference!r}"
        )
    is_path = source.endswith(".py") or os.sep in source
    loaded: Any = _load_file(Path(source).expanduser()) if is_path else _load_module(source)
    for part in name.split("."):
        try:
            loaded = getattr(loaded, part)  # not vars(): some packages import their contents lazily
        except AttributeError as error:
            names = [known for known in dir(loaded) if not known.startswith("_")]
            public = [known for known in names if not isinstance(getattr(loaded, known, None), ModuleType)]
            raise UsageError(f"{part!r} was not found in {source}{_suggestion(part, public)}") from error
        except ImportError as error:
            raise UsageError(f"{part} in {source} cannot be imported: {error}") from error
    if not callable(loaded):
        raise UsageError(f"{name!r} in {source} is not callable ({type(loaded).__name__}: {loaded!r})")
    return loaded


def as_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that was given itself or by its reference.

    Raises:
        ValueError: as of :func:`load_function`.
    """
    return load_function(function) if isinstance(function, str) else function


def _load_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (now := new_name(name)) is not None:
            raise UsageError(f"{name} is now {now}") from error
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{name} cannot be imported: {error}") from error  # a module that it imports is missing
        raise UsageError(
            f"no module named {error.name!r} (to import {name}); specify a function in a file as "
            f"path/to/file.py:function"
        ) from error
    except Exception as error:
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file() and not path.is_absolute():
        path = next((candidate for folder in sys.path if (candidate := Path(folder, path)).is_file()), path)
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*.py")]
        suggestion = _suggestion(path.name, files) if path.parent.is_dir() else ""
        working_directory = ""
        if not path.is_absolute():
            working_directory = f" (working directory: {Path.cwd()})"
        raise UsageError(f"file not found: {path}{suggestion}{working_directory}")
    path = path.resolve()
    # The name is the same in every process, so that objects of the file's classes can be sent between processes.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file: its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; available: {', '.join(sorted(known)[:8])}" if known else ""


def arguments_of(method: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that a method has; a method with ``**kwargs`` gets all."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = [parameter.name for parameter in parameters]
    if unknown := [p.name for p in parameters if p.default is p.empty and p.name not in offered]:
        raise TypeError(f"{method.__qualname__} needs {unknown[0]!r}, but only {', '.join(offered)} are passed")
    return {name: offered[name] for name in names if name in offered}
