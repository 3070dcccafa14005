"""Classes that a configuration names, with their arguments, as the schema knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.cli.merging import CLASS_KEYS, REQUIRED, TRAINER
from lightning_rlhf.cli.signatures import Schema, alternatives, classes_of, only_class
from lightning_rlhf.extras.schema.known import definition, is_class

_MODEL = "lightning_rlhf.models.loading.Pretrained"


@dataclass(frozen=True)
class Used:
    """A class in a configuration.

    Args:
        key: dotted key of its value.
        path: its ``class_path``; empty if only the option names the class.
        entry: definition of the class; None if the schema does not know it.
        arguments: arguments in the configuration.
        is_complete: whether the configuration has all arguments of the constructor.
    """

    key: str
    path: str
    entry: Schema | None
    arguments: dict[str, Any]
    is_complete: bool = False

    @property
    def options(self) -> Mapping[str, Schema]:
        """Options of the class; empty if they are unknown."""
        return {} if self.entry is None else self.entry["properties"]

    @property
    def unknown(self) -> list[str]:
        """Arguments that the class does not have."""
        return [str(name) for name in self.arguments if self.options and name not in self.options]

    @property
    def missing(self) -> list[str]:
        """Arguments without a default that the configuration does not have."""
        required = self.entry["x-required"] if self.entry is not None and self.is_complete else ()
        return [name for name in required if name not in self.arguments]

    @property
    def is_trainer(self) -> bool:
        """Whether the class is Lightning's Trainer."""
        return self.key == "trainer"

    @property
    def label(self) -> str:
        """Key and class, for messages."""
        return self.key if self.entry is None or self.is_trainer else f"{self.key} ({self.entry['title']})"

    def is_a(self, path: str) -> bool:
        """Return whether the class is known to be one with a full name, or a subclass of it."""
        return self.entry is not None and path in self.entry["x-bases"]


def trainer(arguments: dict[str, Any]) -> Used:
    """Return the Trainer with its arguments."""
    return Used("trainer", "", definition(TRAINER), arguments)


def classes_in(value: Any, key: str, option: Schema | None) -> Iterator[Used]:
    """Yield the classes in a value, outer ones first.

    Args:
        value: part of a configuration.
        key: its dotted key.
        option: node of the option; None if it is unknown.
    """
    if isinstance(value, list):
        for entry in value:
            spec = {"class_path": entry} if isinstance(entry, str) and key == "trainer.callbacks" else entry
            yield from classes_in(spec, key, _inside(option, "items"))
    elif isinstance(value, dict) and key == "trainer":
        for name, part in value.items():
            yield from classes_in(part, f"trainer.{name}", trainer({}).options.get(name))
    elif isinstance(value, dict) and "class_path" not in value and _inside(option, "additionalProperties") is not None:
        for name, part in value.items():
            yield from classes_in(part, f"{key}.{name}", _inside(option, "additionalProperties"))
    elif isinstance(value, dict):
        used = _class(value, key, option)
        yield used
        for name, part in used.arguments.items():
            yield from classes_in(part, f"{key}.{name}", used.options.get(name))


def _class(value: dict[str, Any], key: str, option: Schema | None) -> Used:
    path = value.get("class_path")
    arguments = value.get("init_args")
    arguments = {
        **(arguments if isinstance(arguments, dict) else {}),
        **{name: part for name, part in value.items() if name not in CLASS_KEYS},
    }
    default = (option or {}).get("x-default")
    if isinstance(path, str):
        entry = definition(path)
    elif _MODEL in classes_of(option) and "path" in arguments:
        entry = definition(_MODEL)
    else:
        entry = definition(default or only_class(option) or "")
    bases = {*classes_of(option), *classes_of(_inside(option, "items"))}
    is_one = entry is not None and not bases.isdisjoint(entry.get("x-bases", ()))
    is_complete = (is_one and (bool(path) or default is None)) or (key in REQUIRED and entry is not None)
    entry = entry if is_class(entry) else None
    return Used(key, path if isinstance(path, str) else "", entry, arguments, is_complete)


def _inside(option: Schema | None, name: str) -> Schema | None:
    """Return the node of the entries of a list, or of the values of names with values; None without one."""
    return next((node[name] for node in alternatives(option) if isinstance(node.get(name), dict)), None)
