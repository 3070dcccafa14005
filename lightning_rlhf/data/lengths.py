"""What becomes of a row that is too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from lightning_rlhf.data.row import BadRow, LeftOut

TooLong = Literal["bad_row", "drop", "cut_start", "cut_end", "cut_middle"]
_Item = TypeVar("_Item")
_ADVICE = (
    "a larger max_tokens takes longer rows, too_long: drop leaves them out, and cut_start, cut_middle or cut_end cut"
)


def refuse(tokens: int, limit: int, what: str, too_long: TooLong) -> None:
    """Say that a row is too long.

    Raises:
        LeftOut: if such rows are to be dropped.
        BadRow: otherwise.
    """
    kind = LeftOut if too_long == "drop" else BadRow
    raise kind(f"{what} has {tokens} tokens, the limit is {limit}", f"{what} longer than {limit} tokens", _ADVICE)


def cut(items: Sequence[_Item], excess: int, too_long: TooLong) -> list[_Item]:
    """Take items away at the start, at the end or in the middle.

    Args:
        items: tokens, or what goes with them one by one.
        excess: how many to take away, in [0, len(items)].
        too_long: where.
    """
    kept = len(items) - excess
    head = {"cut_start": 0, "cut_end": kept, "cut_middle": (kept + 1) // 2}[too_long]
    return [*items[:head], *items[len(items) - (kept - head) :]]
