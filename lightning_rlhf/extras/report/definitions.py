"""Units and meanings of metrics, from the tables of docs/metrics.md, which metrics.json repeats."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("metrics.json")  # written by python -m tests.metric_definitions
_PLACEHOLDERS = {
    "<reward>": "[^/]+",
    "<role>": "[a-z_]+",
    "<source>": "[^/]+",
    "<k>": "[0-9]+",
    "<n>": "[0-9]+",
    "<option>": "(?:token|sequence_sum|sequence_mean|sequence_max)_k[123]",
    "<metric>": "[^/]+",
    "<key>": "[^/]+",
}


def definitions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return unit, meaning and link of metrics by name; those that runs of this package do not log are left out.

    Args:
        names: names of metrics.
    """
    known = {name: _definition(name) for name in names}
    return {name: definition for name, definition in known.items() if definition is not None}


@cache
def _definition(name: str) -> dict[str, str] | None:
    """Return unit and meaning of a metric, or those of all sources for a metric of one source; None if unknown."""
    without_source = re.sub("^val/[^/]+/", "val/", name)
    for known in (name, re.sub("^val/env/", "env/", name), without_source):
        for pattern, definition in _patterns():
            if pattern.fullmatch(known):
                return definition
    return None


@cache
def _patterns() -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Return a pattern and the definition of each metric; patterns with more fixed characters are first."""
    patterns = []
    for row, (unit, meaning) in json.loads(_TABLE.read_text(encoding="utf-8")).items():
        for name in expanded(row):
            fixed = len(re.sub("<.*?>", "", name)) if "<" in name else len(name) + 1000
            pattern = re.escape(name)
            for placeholder, values in _PLACEHOLDERS.items():
                pattern = pattern.replace(re.escape(placeholder), values)
            patterns.append((fixed, re.compile(pattern), {"unit": unit, "meaning": meaning}))
    patterns.sort(key=lambda entry: -entry[0])
    return [(pattern, definition) for _, pattern, definition in patterns]


def expanded(row: str) -> list[str]:
    """Return the names of a row of the table: all alternatives of ``{a,b}``, with placeholders such as ``<reward>``."""
    parts = re.split(r"\{(.*?)\}", row)
    return ["".join(choice) for choice in itertools.product(*(part.split(",") for part in parts))]
