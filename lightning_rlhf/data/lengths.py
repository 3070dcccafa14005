"""Handling of rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from lightning_rlhf.data.row import BadRow, SkippedRow

TooLong = Literal["bad_row", "drop", "cut_start", "cut_end", "cut_middle"]
_Item = TypeVar("_Item")
_ADVICE = (
    "to use longer rows, raise max_tokens; to skip them, set too_long: drop; to cut them, set too_long: cut_start, "
    "cut_middle or cut_end"
)


def raise_too_long(tokens: int, limit: int, label: str, too_long: TooLong, advice: str = _ADVICE) -> None:
    """Raise an error for a row that is too long.

    Args:
        tokens: number of tokens of the text.
        limit: largest number.
        label: name of the text in error messages.
        too_long: treatment of such rows.
        advice: options that make the row usable.

    Raises:
        SkippedRow: ``too_long`` is ``drop``.
        BadRow: otherwise.
    """
    kind = SkippedRow if too_long == "drop" else BadRow
    raise kind(f"{label} has {tokens} tokens, the limit is {limit}", f"{label} longer than {limit} tokens", advice)


def cut(items: Sequence[_Item], excess: int, too_long: TooLong) -> list[_Item]:
    """Remove items at the start, at the end or in the middle.

    Args:
        items: tokens, or one value for each token.
        excess: number of items to remove, in [0, len(items)].
        too_long: position of the cut: ``cut_start``, ``cut_end`` or ``cut_middle``.
    """
    size = len(items) - excess
    head = {"cut_start": 0, "cut_end": size, "cut_middle": (size + 1) // 2}[too_long]
    return [*items[:head], *items[len(items) - (size - head) :]]
