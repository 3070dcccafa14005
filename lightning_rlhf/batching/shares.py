"""Which rows of a batch each rank takes."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal rows out so that every rank has as many as any other, or one less, and about as many tokens.

    Rows are dealt longest first, there and back along the ranks (ties by position, so that all ranks agree).

    Args:
        lengths: tokens of each of B rows.
        ranks: at least 1.

    Returns:
        Row numbers of each rank, ascending; together every row once.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for place, row in enumerate(longest_first):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(row)
    return [sorted(share) for share in shares]
