"""Classes that a configuration names: where they are looked for, and what they must be before they are called."""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

_MOST_VALUES = 100_000


def find_classes_beside(arguments: list[str]) -> None:
    """Let ``class_path`` name classes in files beside the configuration or in the working directory.

    The folders come last in the search, so that no file in them replaces an installed package.

    Args:
        arguments: of the command line.
    """
    for folder in [Path.cwd(), *(file.resolve().parent for file in config_files(arguments))]:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def config_files(arguments: list[str]) -> list[Path]:
    """Return the files that a command line gives as ``--config``.

    Args:
        arguments: of the command line.
    """
    files = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    files += [file for option, file in itertools.pairwise(arguments) if option == "--config"]
    return [Path(file).expanduser() for file in files]


def check_aliases(file: Path) -> None:
    """Validate that the aliases of a YAML file do not multiply: nine levels of nine would be 387 million values.

    Args:
        file: a configuration; one that is missing or is not YAML is left to the parser.

    Raises:
        ValueError: written out, the file has more than 100,000 values.
    """
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return
    if root is not None and (size := _size(root, {})) > _MOST_VALUES:
        raise ValueError(f"{file} has {size} values when its aliases are written out, allowed are {_MOST_VALUES}")


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values below a node, where one that several aliases name counts each time."""
    if id(node) not in known:
        known[id(node)] = 1  # of a node within itself
        if isinstance(node, yaml.MappingNode):
            known[id(node)] = 1 + sum(_size(part, known) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            known[id(node)] = 1 + sum(_size(part, known) for part in node.value)
    return known[id(node)]


def check_classes(config: Any) -> None:
    """Validate that each ``class_path`` names a class, or a class method that makes an instance of its class.

    The ``class_path`` of an optimizer could otherwise be any function, and would be called.

    Args:
        config: parsed; nothing of it has been made.

    Raises:
        ValueError: it is a function, for example.
    """
    for key, class_path in _class_paths("", config):
        named = pkgutil.resolve_name(class_path)
        if not isinstance(named, type) and not _makes_its_class(named):
            raise ValueError(f"{key}: class_path must name a class, got {class_path!r}, a {type(named).__name__}")


def _makes_its_class(named: Any) -> bool:
    """Return whether this is a class method that is annotated to return its class."""
    owner = getattr(named, "__self__", None)
    if not inspect.ismethod(named) or not isinstance(owner, type):
        return False
    return inspect.signature(named).return_annotation in (owner, owner.__name__, "Self")


def _class_paths(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, class path) of all classes in a configuration."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield key, value["class_path"]
        for name, part in value.items():
            yield from _class_paths(key if name == "init_args" else f"{key}.{name}".lstrip("."), part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _class_paths(key, part)
