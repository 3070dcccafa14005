"""Configuration files: the import path of users' classes, and checks of the values before any class is called."""

from __future__ import annotations

import difflib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_rlhf.expected_errors import UsageError

_MOST_VALUES = 100_000


class _Loader(yaml.CSafeLoader):
    """Reads values as jsonargparse does: ``1e-3`` is a number, and a date a text."""


_OTHER = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


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


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for help, such as ``--help`` or ``--model.help``."""
    names = [argument.partition("=")[0] for argument in arguments]
    return any(name in ("-h", "--help", "--help-all") or name.endswith(".help") for name in names)


def check_config_files(arguments: Sequence[str]) -> None:
    """Validate that the configuration files of a command line exist and are YAML.

    Raises:
        UsageError: a file does not exist, or is not a YAML mapping.
    """
    for file in config_files(arguments):
        if not file.is_file():
            near = difflib.get_close_matches(file.name, [path.name for path in file.parent.glob("*.y*ml")], n=1)
            hint = "; it is a directory: name the file in it" if file.is_dir() else ""
            if near:
                hint = f"; did you mean {str(file.with_name(near[0]))!r}?"
            elif file.parts[0] == "configs":
                hint = "; configs/ is in the repository: lightning-rlhf new --list lists it, and new writes a copy"
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
        if root is not None:
            _check_unique(root, file)
        content = _Loader(text).get_single_data()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a text file in UTF-8: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        has_tab = "\t" in line[: len(line) - len(line.lstrip())]
        remedy = "indent with spaces, not with tabs" if has_tab else "check the indentation, brackets and quotes"
        raise UsageError(f"{file} is not valid YAML: {error.problem}{position}; {remedy}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        got = "nothing" if content is None else f"{type(content).__name__} {content!r:.50}"
        raise UsageError(f"{file} must contain keys such as 'model:' and 'trainer:', got {got}")
    return content


def read_text(text: str) -> Any:
    """Return the value of a text in YAML, whose numbers are those of :func:`read_yaml`."""
    return _Loader(text).get_single_data()


def _check_unique(root: yaml.Node, file: Path) -> None:
    """Raise for a key that a mapping has twice: YAML would silently take the last one."""
    remaining: list[yaml.Node] = [root]
    visited: set[int] = set()
    while remaining:
        node = remaining.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            remaining += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                remaining.append(value)
                if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                    continue
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    raise UsageError(
                        f"{file}, line {line}: {key.value!r} was set in line {lines[name]} already, and only one of "
                        f"them can count: remove one"
                    )
                lines[name] = line


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
