"""Distribution of rows over mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.types import TensorBatch


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


def shuffled(rows: TensorBatch, seed: int, keep_groups: bool) -> Tensor:
    """Return a random order of rows.

    Args:
        rows: B rows.
        seed: seed of the order.
        keep_groups: whether the responses to a prompt become neighbours, at the position of the first of them.

    Returns:
        (B,) int64 permutation.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    prompts = rows.prompt_numbers() if keep_groups else None
    if prompts is None:  # pairs of responses have no common prompt to share
        return order
    numbers = prompts[0].cpu()[order]
    first = (numbers.unsqueeze(1) == numbers).long().argmax(dim=1)
    return order[first.argsort(stable=True)]
