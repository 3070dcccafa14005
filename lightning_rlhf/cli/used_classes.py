"""Classes that a configuration names, with their arguments, read without importing them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rlhf.cli.source_classes import Absent, Parameter, SourceClass, class_named, find_class

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
REQUIRED = ("model", "data")
_TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class UsedClass:
    """A class in a configuration.

    Args:
        key: dotted key of its value.
        path: its ``class_path``; empty if only the annotation names the class.
        kind: the class; None if it is unknown, or does not exist.
        arguments: arguments in the configuration.
        absent: sentence about a class that does not exist.
        is_complete: whether the configuration has all arguments of the constructor.
    """

    key: str
    path: str
    kind: SourceClass | None
    arguments: dict[str, Any]
    absent: str = ""
    is_complete: bool = False

    @property
    def known(self) -> dict[str, Parameter]:
        """Parameters of the class; empty if they are unknown."""
        if self.kind is None:
            return {}
        return self.kind.parameters

    @property
    def is_trainer(self) -> bool:
        """Whether the class is Lightning's Trainer."""
        return self.kind is not None and self.kind.path == _TRAINER

    @property
    def label(self) -> str:
        """Key and class, for messages."""
        if self.kind is None or self.is_trainer:
            return self.key
        return f"{self.key} ({self.kind.name})"


def of_kind(value: Any, kind: type[_Kind]) -> _Kind:
    """Return a value if it is of a type, else an empty value of the type: users may write anything anywhere."""
    if isinstance(value, kind):
        return value
    return kind()


def entries_of(value: Any) -> list[Any]:
    """Return the entries of a list; a value of another type is the only entry."""
    if isinstance(value, list):
        return value
    return [value]


def classes_in(value: Any, key: str, annotation: Any) -> Iterator[UsedClass]:
    """Yield the classes in a value, outer ones first.

    Args:
        value: part of a configuration.
        key: its dotted key.
        annotation: annotation of the parameter, or the class itself; None if it is unknown.
    """
    if isinstance(value, list):
        for entry in value:
            yield from classes_in({"class_path": entry} if _is_callback(key, entry) else entry, key, annotation)
    elif isinstance(value, dict):
        path = of_kind(value.get("class_path"), str)
        named = named_class(path) if path else only_class(annotation)
        kind = named if isinstance(named, SourceClass) else None
        direct = {name: entry for name, entry in value.items() if name not in CLASS_KEYS}  # of the command line
        arguments = {**of_kind(value.get("init_args"), dict), **direct}
        is_complete = key in REQUIRED or key == "trainer.callbacks" or accepts(annotation, kind)
        absent = named.message if isinstance(named, Absent) else ""
        yield UsedClass(key, path, kind, arguments, absent=absent, is_complete=is_complete)
        known = {} if kind is None else kind.parameters
        for name, entry in arguments.items():
            inner = known[name].annotation if name in known else None
            yield from classes_in(entry, f"{key}.{name}", inner)


def accepts(annotation: Any, kind: SourceClass | None) -> bool:
    """Return whether a class is one of those in an annotation, or a subclass."""
    options = [annotation, *typing.get_args(annotation)]
    sources = [source for option in options if (source := getattr(option, "source", None)) is not None]
    return kind is not None and any(kind.is_subclass(source.path) for source in sources)


def _is_callback(key: str, entry: Any) -> bool:
    """Return whether an entry of a list is the path of a callback without arguments."""
    return key == "trainer.callbacks" and isinstance(entry, str)


def named_class(path: str) -> Any:
    """Return the class with a full or short name; None if it is unknown, Absent if it does not exist."""
    if "." in path and ".py:" not in path:
        return find_class(path)
    return class_named(path)


def trainer_class() -> SourceClass:
    """Return Lightning's Trainer."""
    trainer = find_class(_TRAINER)
    assert isinstance(trainer, SourceClass)
    return trainer


def only_class(annotation: Any) -> SourceClass | None:
    """Return the class in an annotation such as ``list[RewardFunction] | None``; None if there are several."""
    if isinstance(annotation, SourceClass):
        return annotation
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return getattr(annotation, "source", None)
    kinds = [only_class(part) for part in typing.get_args(annotation)]
    ours = [kind for kind in kinds if kind is not None]
    if len(ours) == 1:
        return ours[0]
    return None
