"""Options of classes as nodes of a JSON schema, made from their signatures.

The merge of configurations reads them, and the schema that editors read is made of them. A node with ``x-classes``
accepts those classes and their subclasses; an empty node accepts anything.
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import yaml
from jsonargparse._parameter_resolvers import get_signature_parameters

from lightning_rlhf.cli.config_files import read_text
from lightning_rlhf.entry_points import offered

Schema = dict[str, Any]
CLASSES = "x-classes"
_LISTS = (list, tuple, set, Iterable, Sequence)
_MAPPINGS = (dict, Mapping)
# A text is read as YAML, so that "3" is a number, too.
_PLAIN: dict[Any, Schema] = {
    int: {"type": ["integer", "string"], "pattern": r"^\s*[-+]?[\d_]+\s*$"},
    float: {
        "type": ["number", "string"],
        "pattern": r"^\s*[-+]?(\.?\d[\d_.eE+-]*|\.?([iI]nf|INF)|\.(nan|NaN|NAN))\s*$",
    },
    bool: {
        "type": ["boolean", "string"],
        "pattern": "^([tT]rue|TRUE|[fF]alse|FALSE|[yY]es|YES|[nN]o|NO|[oO]n|ON|[oO]ff|OFF)$",
    },
    str: {"type": "string"},
    types.NoneType: {"type": ["null", "string"], "pattern": "^(null|Null|NULL|~)?$"},
}
_KINDS: dict[str, Any] = {
    "integer": int, "number": int | float, "boolean": bool, "string": str, "null": types.NoneType,
    "array": list, "object": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A class with the options of its constructor.

    Args:
        path: its full name.
        bases: full names of the class and its base classes.
        options: node of each option.
    """

    path: str
    bases: Sequence[str]
    options: Mapping[str, Schema]

    @property
    def name(self) -> str:
        """Name without the module."""
        return self.path.rpartition(".")[2]


Find = Callable[[str], Known | None]


def find_class(path: str) -> Known | None:
    """Return the class with a full or short name; None if there is none."""
    try:
        kind = pkgutil.resolve_name(path) if "." in path else _with_short_name(path)
    except Exception:  # of a user's module: the parser imports it again, and reports it
        return None
    return known_class(kind) if isinstance(kind, type) else None


def _with_short_name(name: str) -> Any:
    """Return the class of this package with a name, or that of an extra; None if there is none."""
    public = sys.modules["lightning_rlhf"]
    if name in public.__all__:
        return getattr(public, name)
    modules = [module for key, module in list(sys.modules.items()) if key.startswith("lightning_rlhf.")]
    kinds = [vars(module).get(name) for module in modules]
    for kind in kinds:
        if isinstance(kind, type) and kind.__module__.startswith("lightning_rlhf"):
            return kind
    paths = [full_name_of(name) for full_name_of in offered("full_name")]
    return next((pkgutil.resolve_name(path) for path in paths if path is not None), None)


@functools.cache
def known_class(kind: type) -> Known:
    """Return a class with its options, as jsonargparse reads them from its signature and those of its base classes."""
    bases = [full_name(base) for base in kind.__mro__[:-1]]
    return Known(full_name(kind), bases, {each.name: schema_of(each.annotation) for each in parameters_of(kind)})


def parameters_of(kind: type) -> list[Any]:
    """Return the parameters of a constructor as jsonargparse has them; none if it has no constructor of its own."""
    try:
        return list(get_signature_parameters(kind, None, logger=False))
    except ValueError:
        return []


def full_name(kind: type) -> str:
    """Return the module and the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def schema_of(annotation: Any) -> Schema:
    """Return the node of an annotation."""
    origin, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union([schema_of(part) for part in parts if getattr(part, "__name__", "") != "Tensor"])
    if origin is Literal:
        return {"enum": list(parts)}
    if isinstance(origin, type) and origin in _PLAIN:
        return _PLAIN[origin]
    if origin in _LISTS:
        items = schema_of(parts[0]) if parts and (origin is not tuple or parts[1:] == (...,)) else {}
        return {"type": "array"} | ({"items": items} if items else {})
    if origin in _MAPPINGS:
        return {"type": "object"} | (
            {"additionalProperties": values} if parts and (values := schema_of(parts[1])) else {}
        )
    return {CLASSES: [full_name(annotation)]} if _is_class(annotation) else {}


def _union(options: Sequence[Schema]) -> Schema:
    """Return the node of a union: with all of its classes in one node."""
    classes = [path for option in options for path in option.get(CLASSES, [])]
    plain = [option for option in options if CLASSES not in option and option is not _PLAIN[types.NoneType]]
    null = [option for option in options if option is _PLAIN[types.NoneType]]
    options = [*plain, *([{CLASSES: classes}] if classes else []), *null]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _is_class(annotation: Any) -> bool:
    """Return whether an annotation is a class that a configuration names by ``class_path``."""
    if not inspect.isclass(annotation) or issubclass(annotation, int | float | str | os.PathLike | Enum):
        return False
    root, _, rest = annotation.__module__.partition(".")
    return root not in {*sys.stdlib_module_names, "jsonargparse"} and (root, rest) != ("torch", "")  # such as a device


def alternatives(schema: Schema | None) -> list[Schema]:
    """Return the nodes of a union; the only one of another node, and none of an unknown option."""
    if schema is None:
        return []
    if CLASSES in schema or "anyOf" not in schema:
        return [schema]
    return [part for option in schema["anyOf"] for part in alternatives(option)]


def classes_of(schema: Schema | None) -> list[str]:
    """Return the full names of the classes that an option accepts, without those in lists and in names with values."""
    return [path for option in alternatives(schema) for path in option.get(CLASSES, [])]


def only_class(schema: Schema | None) -> str | None:
    """Return the class of an option such as ``list[RewardFunction] | None``; None if there are several."""
    paths = classes_of(schema)
    for option in alternatives(schema):
        inner = option.get("items") or option.get("additionalProperties")
        paths += [path] if isinstance(inner, dict) and (path := only_class(inner)) else []
    return paths[0] if len(paths) == 1 else None


def fits(value: Any, schema: Schema) -> bool:
    """Return whether a value, or what its text is in YAML, may be one of an option."""
    values = [value, *_read(value)]
    return any(_matches(each, option) for each in values for option in alternatives(schema))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, true, false or null."""
    return isinstance(value, bool | int | float | str | None)


def _matches(value: Any, option: Schema) -> bool:
    if CLASSES in option:
        return not is_plain(value) or _may_name_a_class(value)
    if "enum" in option:
        return value in option["enum"]
    kinds = option.get("type", [])
    kind = kinds if isinstance(kinds, str) else next(iter(kinds), "")
    if isinstance(value, bool):
        return kind in ("boolean", "")
    if kind == "string" and "pattern" in option:
        return isinstance(value, str) and re.search(option["pattern"], value) is not None
    if kind == "array" and isinstance(value, list):
        return all(fits(entry, option.get("items", {})) for entry in value)
    return not kind or isinstance(value, _KINDS[kind])


def _may_name_a_class(value: Any) -> bool:
    """Return whether a value is the name of a class, or a reference to a function or to a file."""
    is_name = isinstance(value, str) and (value[:1].isupper() or any(mark in value for mark in "./:"))
    return is_name and not re.match(_PLAIN[float]["pattern"], value)


def _read(value: Any) -> Iterator[Any]:
    """Yield the value that a text has in YAML."""
    if isinstance(value, str):
        try:
            yield read_text(value)
        except yaml.YAMLError:
            return
