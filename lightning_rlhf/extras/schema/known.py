"""The classes in ``schema.json``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.signatures import Known, Schema

SCHEMA = Path(__file__).with_name("schema.json")
SCHEDULE = "lightning_rlhf.modules.schedules.RunSchedule"


@functools.cache
def schema() -> Schema:
    """Return the content of ``schema.json``."""
    result: Schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return result


@functools.cache
def _by_name() -> dict[str, str]:
    """Return the full name of the class for each of the names of the classes."""
    found: dict[str, set[str]] = {}
    for path, entry in schema()["$defs"].items():
        for name in (path, *entry.get("x-names", ())):
            found.setdefault(name, set()).add(path)
    return {name: next(iter(paths)) for name, paths in found.items() if len(paths) == 1}


def full_name(name: str) -> str | None:
    """Return the full name of a class by one of its names; None for a class that the schema does not know."""
    return _by_name().get(name)


def definition(path: str) -> Schema | None:
    """Return the definition of a class by one of its names; None for a class that the schema does not know."""
    home = full_name(path)
    return None if home is None else schema()["$defs"][home]


def is_class(entry: Schema | None) -> bool:
    """Return whether a definition is one of a class, and not of values such as those of an option's kinds."""
    return entry is not None and "x-names" in entry


def schedules() -> list[str]:
    """Return the kinds of RunSchedule."""
    entry = definition(SCHEDULE)
    return [] if entry is None else list(entry["properties"]["kind"]["enum"])


def find(path: str) -> Known | None:
    """Return a class by one of its names; None for a class that the schema does not know."""
    entry: Any = definition(path)
    if not is_class(entry):
        return None
    return Known(_by_name()[path], entry["x-bases"], entry["properties"])


def names() -> list[str]:
    """Return all names of classes."""
    return list(_by_name())
