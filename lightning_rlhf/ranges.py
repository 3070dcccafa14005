"""Ranges of numbers, and the message about one that is outside of its range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_rlhf.expected_errors import UsageError

_RANGES: Mapping[str, Callable[[float], bool]] = {
    "positive": lambda value: value > 0,
    "positive and finite": lambda value: 0 < value < math.inf,
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "greater than 1": lambda value: value > 1,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in [0, 0.5)": lambda value: 0 <= value < 0.5,
}


def check_ranges(owner: object, **ranges: str) -> None:
    """Check attributes of an object, such as ``check_ranges(self, beta="positive", clip="in (0, 1] or null")``.

    Raises:
        UsageError: one is outside of its range; NaN always is.
    """
    for name, wanted in ranges.items():
        check_range(name, getattr(owner, name), wanted)


def check_range(name: str, value: Any, wanted: str) -> None:
    """Check a number; ``or null`` after the range allows None.

    Raises:
        UsageError: it is outside of its range.
    """
    range_name = wanted.removesuffix(" or null")
    if (value is None and range_name != wanted) or (value is not None and _RANGES[range_name](value)):
        return
    verb = "lie" if wanted.startswith("in ") else "be"
    raise UsageError(f"{name} must {verb} {wanted}, got {value}")


def check_at_least(least: float, **values: float) -> None:
    """Check the lower bound of arguments.

    Raises:
        UsageError: a value is smaller than ``least``.
    """
    for name, value in values.items():
        if not value >= least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
