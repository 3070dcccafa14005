"""Micro-batches by token budget."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.ranges import check_range


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
    check_range("micro_batch_tokens", budget, "positive")
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


def shared_prompt_batches(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], prompts: Sequence[int], budget: int
) -> list[Tensor]:
    """Split responses into micro-batches in which the responses to a prompt share it, alike lengths together.

    A micro-batch costs the tokens of its responses, and of each prompt once. The responses to a prompt stay together
    where they fit into the budget.

    Args:
        prompt_lengths: number of tokens of the prompt of each of B responses.
        response_lengths: number of tokens of each response.
        prompts: number of the prompt of each response.
        budget: most tokens in one micro-batch; a longer response is a micro-batch alone.

    Returns:
        Row numbers of each micro-batch; together every row once.
    """
    parts: list[tuple[int, list[int]]] = []  # tokens and rows of responses that share a prompt
    last_prompt = None
    for row in sorted(range(len(prompts)), key=lambda row: (prompts[row], -response_lengths[row])):
        if prompts[row] == last_prompt and parts[-1][0] + response_lengths[row] <= budget:
            tokens, rows = parts[-1]
            parts[-1] = (tokens + response_lengths[row], [*rows, row])
        else:
            parts.append((prompt_lengths[row] + response_lengths[row], [row]))
        last_prompt = prompts[row]
    batches: list[list[int]] = []
    total = 0
    for tokens, rows in sorted(parts, key=lambda part: -part[0]):
        if batches and total + tokens <= budget:
            batches[-1] += rows
            total += tokens
        else:
            batches.append([*rows])
            total = tokens
    return [torch.tensor(rows) for rows in batches]
