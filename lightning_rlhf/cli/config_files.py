"""Configuration files: the import path of users' classes, and checks of the values before any class is called."""

from __future__ import annotations

import difflib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_rlhf.expected_errors import UsageError

_MOST_VALUES = 100_000


def add_import_folders(arguments: Sequence[str] = ()) -> None:
    """Make modules in the working directory and in the folders of the configurations importable.

    The folders are appended to ``sys.path``, so that a file ``torch.py`` in them does not hide an installed package.
    """
    for folder in [Path.cwd(), *(file.resolve().parent for file in config_files(arguments))]:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def config_files(arguments: Sequence[str]) -> list[Path]:
    """Return the files that a command line contains as ``--config``."""
    files = [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]
    files += [file for option, file in itertools.pairwise(arguments) if option == "--config"]
    return [Path(file).expanduser() for file in files]


def check_config_files(arguments: Sequence[str]) -> None:
    """Validate that the configuration files of a command line exist and are YAML.

    Raises:
        UsageError: a file does not exist, or is not a YAML mapping.
    """
    for file in config_files(arguments):
        if not file.is_file():
            near = difflib.get_close_matches(file.name, [path.name for path in file.parent.glob("*.y*ml")], n=1)
            hint = ""
            if near:
                hint = f"; did you mean {str(file.with_name(near[0]))!r}?"
            raise UsageError(f"configuration file not found: {file}{hint} (working directory: {Path.cwd()})")
        read_yaml(file)


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        UsageError: the file is not a YAML mapping, or its aliases expand to too many values.
    """
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
        if root is not None and (size := _size(root, {})) > _MOST_VALUES:
            raise UsageError(f"{file} has {size} values after its aliases are expanded, allowed: {_MOST_VALUES}")
        content = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a text file in UTF-8: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = ""
        if mark:
            position = f", line {mark.line + 1}, column {mark.column + 1}"
        line = ""
        if mark and mark.line < len(text.splitlines()):
            line = text.splitlines()[mark.line]
        has_tab = "\t" in line[: len(line) - len(line.lstrip())]
        remedy = "check the indentation, brackets and quotes"
        if has_tab:
            remedy = "indent with spaces, not with tabs"
        raise UsageError(f"{file} is not valid YAML: {error.problem}{position}; {remedy}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{file} must contain keys such as 'model:' and 'trainer:', got {type(content).__name__} {content!r:.50}"
        )
    return content


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the values of a node; an aliased node counts at each use."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # for a node that contains itself
        if isinstance(node, yaml.MappingNode):
            sizes[id(node)] = 1 + sum(_size(part, sizes) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            sizes[id(node)] = 1 + sum(_size(part, sizes) for part in node.value)
    return sizes[id(node)]


def check_classes(config: Any) -> None:
    """Validate that each ``class_path`` names a class, or a class method that returns an instance of its class.

    Otherwise any function could be the ``class_path`` of an optimizer, and would be called.

    Raises:
        UsageError: a ``class_path`` names another object, such as a function.
    """
    for key, class_path in _class_paths("", config):
        named = pkgutil.resolve_name(class_path)
        if not isinstance(named, type) and not _makes_its_class(named):
            raise UsageError(f"{key}: class_path must name a class, got {class_path!r}, a {type(named).__name__}")


def _makes_its_class(function: Any) -> bool:
    """Return whether this is a class method that is annotated to return its class."""
    owner = getattr(function, "__self__", None)
    if not inspect.ismethod(function) or not isinstance(owner, type):
        return False
    return inspect.signature(function).return_annotation in (owner, owner.__name__, "Self")


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
