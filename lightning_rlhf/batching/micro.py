"""Micro-batches by token budget."""

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError


def token_budget_batches(lengths: Tensor, budget: int, packed: bool = False) -> list[Tensor]:
    """Split rows into micro-batches whose size stays within a budget, alike lengths together.

    A micro-batch of n rows costs n x its longest row, or packed the sum of its rows. Rows are sorted by length (ties by
    position, so the split is the same on all machines), longest first: the largest micro-batch comes first, so that
    one that does not fit into memory fails at once.

    Args:
        lengths: (B,) tokens of each row.
        budget: most tokens in one micro-batch; a single longer row is a micro-batch alone.
        packed: whether rows are concatenated without padding.

    Returns:
        Row numbers of each micro-batch; together every row once.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget < 1:
        raise UsageError(f"micro_batch_tokens must be positive, got {budget}")
    batches: list[list[int]] = []
    lengths = lengths.cpu()  # once, or the host would wait for a GPU twice
    sizes = lengths.tolist()
    widest = total = 0
    for row in torch.argsort(lengths, descending=True, stable=True).tolist():
        if batches and (total + sizes[row] if packed else widest * (len(batches[-1]) + 1)) <= budget:
            batches[-1].append(row)
            total += sizes[row]
        else:
            batches.append([row])
            widest = total = sizes[row]
    return [torch.tensor(rows) for rows in batches]
