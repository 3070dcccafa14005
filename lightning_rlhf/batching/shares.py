"""Distribution of rows over mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def balanced_shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Split rows over ranks so that their numbers of rows differ by at most one, and tokens are about equal.

    Rows are dealt longest first, in serpentine order over the ranks (ties by position, so that all ranks agree).

    Args:
        lengths: tokens of each of B rows.
        ranks: number of ranks, at least 1.

    Returns:
        Row numbers of each rank, ascending; together every row once.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for turn, row in enumerate(longest_first):
        lap, seat = divmod(turn, ranks)
        shares[seat if lap % 2 == 0 else ranks - 1 - seat].append(row)
    return [sorted(share) for share in shares]


def by_prompt(order: Tensor, prompts: Tensor) -> Tensor:
    """Return an order of rows in which the responses to a prompt are neighbours, at the place of the first of them.

    Args:
        order: (B,) int64 permutation of the rows.
        prompts: (B,) int64 number of each row's prompt.
    """
    in_order = prompts[order]
    first = (in_order.unsqueeze(1) == in_order).long().argmax(dim=1)
    return order[first.argsort(stable=True)]
