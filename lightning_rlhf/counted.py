"""Counts in messages."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as ``1 row`` or ``3 rows``.

    Args:
        number: count; infinite for the steps of a run without an end.
        noun: singular noun whose plural ends with s or es.
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"
