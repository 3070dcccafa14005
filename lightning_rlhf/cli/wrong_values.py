"""Messages about values of the wrong type, for a configuration that jsonargparse rejects."""

from __future__ import annotations

import inspect
import os
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

import yaml

from lightning_rlhf.cli.source_classes import SourceClass, class_named, find_module

_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
_COLLECTIONS: dict[Any, str] = {
    **dict.fromkeys((list, tuple, set, Iterable, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "names with values"),
}
_MOST_CHARACTERS = 100  # longest value in a message


def wrong_value(name: str, value: Any, annotation: Any) -> str | None:
    """Describe a value that does not match the annotation of its parameter.

    Args:
        name: name of the parameter.
        value: value in a configuration, or the text of an option.
        annotation: annotation of the parameter; None if it has none.

    Returns:
        None if the value matches, or if the annotation has types other than plain values, texts to choose from,
        collections and classes: such annotations match every value.
    """
    if annotation is None or isinstance(annotation, str):
        return None
    options = _options(annotation)
    values = [value, *_parsed(value)]
    if any(_matches(value, option) for value in values for option in options):
        return None
    if len(repr(value)) <= _MOST_CHARACTERS:
        shown = repr(value)
    else:
        shown = f"{repr(value)[:_MOST_CHARACTERS]}..."
    message = f"{name} must be {_described(options)}, got {shown}"
    if short := next(filter(None, (_as_option(value, option) for option in options)), ""):
        return f"{message}: write {name}: {short}"
    choices = [choice for option in options if _is_class(option) for choice in _subclasses(option)]
    if choices:
        return f"{message}; available: {', '.join(choices)}"
    return message


def _as_option(value: Any, option: Any) -> str:
    """Return a plain value as the first option of a class, or of the class of a list; empty if it does not fit."""
    parts = typing.get_args(option) if typing.get_origin(option) in _COLLECTIONS else (option,)
    source = getattr(parts[0], "source", None) if len(parts) == 1 else None
    if source is None or not _is_plain(value) or not source.parameters:
        return ""
    first, parameter = next(iter(source.parameters.items()))
    fits = any(_matches(each, kind) for each in (value, *_parsed(value)) for kind in _options(parameter.annotation))
    if not fits:
        return ""
    text = f"{{{first}: {value}}}"
    return text if parts == (option,) else f"[{text}]"


def _options(annotation: Any) -> list[Any]:
    """Return the types of a union; the only one of another annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in _options(part)]
    return [annotation]


def _parsed(value: Any) -> Iterator[Any]:
    """Yield the other values that a text can mean: options of a command line are texts."""
    if isinstance(value, str):
        try:
            yield yaml.safe_load(value)
        except yaml.YAMLError:
            return
        try:
            yield float(value)  # YAML reads 1e-3 as a text
        except ValueError:
            return


def _matches(value: Any, option: Any) -> bool:
    if typing.get_origin(option) is Literal:
        return value in typing.get_args(option)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if option in _SCALARS:
        return isinstance(value, option)
    if typing.get_origin(option) in _COLLECTIONS:
        return not _is_plain(value)
    if _is_class(option):
        return not _is_plain(value) or _names_a_class(value, option)
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _is_class(option: Any) -> bool:
    """Return whether an option is a class that a configuration names by ``class_path``."""
    if not inspect.isclass(option) or issubclass(option, int | float | str | os.PathLike | Enum):
        return False
    return option.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "jsonargparse"}


def _described(options: Sequence[Any]) -> str:
    literals = [
        choice for option in options if typing.get_origin(option) is Literal for choice in typing.get_args(option)
    ]
    kinds = [option for option in options if typing.get_origin(option) is not Literal]
    kinds = [
        kind for kind in kinds if getattr(kind, "__name__", "") != "Tensor"
    ]  # stands for numbers, which are listed
    texts = []
    if literals:
        texts = [f"{'one of ' if len(literals) > 1 else ''}{', '.join(map(repr, literals))}"]
    plain = {**_SCALARS, **_COLLECTIONS}
    texts += [plain.get(typing.get_origin(kind) or kind, "a class (class_path: package.Class)") for kind in kinds]
    return " or ".join(dict.fromkeys(texts))


def _names_a_class(value: Any, option: Any) -> bool:
    """Return whether a value is the full name of a class, or the short name of one that an option accepts."""
    if not isinstance(value, str):
        return False
    source = getattr(option, "source", None)
    return ("." in value and value[0].isidentifier()) or (
        source is not None and (named := class_named(value)) is not None and named.is_subclass(source.path)
    )


def _subclasses(kind: Any) -> list[str]:
    """Return the paths of the public classes of this package, or of Lightning's, that an option accepts."""
    source = getattr(kind, "source", None)
    if source is None or source.module.name.partition(".")[0] not in ("lightning_rlhf", "lightning"):
        return []
    modules = [find_module(name) for name in ("lightning_rlhf", source.module.name.rpartition(".")[0])]
    public = {
        f"{module.name}.{name}": module.member(name)
        for module in modules
        if module is not None
        for name in module.names
        if not name.startswith("_")
    }
    return [
        path
        for path, home in sorted(public.items())
        if isinstance(home, SourceClass) and home.is_subclass(source.path) and not home.is_abstract
    ]
