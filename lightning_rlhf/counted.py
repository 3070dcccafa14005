"""Counts in messages."""

from __future__ import annotations

import math


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as ``1 row``, ``3 rows`` or, for infinity, ``any number of rows``.

    Args:
        number: count; infinite for the steps of a run without an end.
        noun: singular noun whose plural ends with s or es.
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    amount = "any number of" if number == math.inf else number
    return f"{amount} {noun}{ending if number != 1 else ''}"
