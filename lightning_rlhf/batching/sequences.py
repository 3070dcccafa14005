"""Prompt and response joined into one right-padded sequence, and where in it each response token is predicted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.types import Rollout


def pad_right(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of differing lengths.

    Args:
        rows: B lists of token ids.
        pad: fills the rest; never seen by a real token.

    Returns:
        ids: (B, L) int64, L the longest row.
        lengths: (B,) int64.
    """
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, lengths


def join(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Put each response right behind its prompt.

    Returns:
        input_ids: (B, L) int64, right-padded with 0, L the longest prompt with response.
        index: (B, T) int64, position of the hidden state that predicts each response token, and at which a critic's
            value is the one *before* that token; clamped to the last position beyond the response.
    """
    prompt, response = rollout.prompt_lengths.unsqueeze(1), rollout.response_lengths.unsqueeze(1)
    position = torch.arange(int(rollout.total_lengths.max()), device=prompt.device).unsqueeze(0)
    from_prompt = rollout.prompt_ids.gather(
        1, position.clamp(max=rollout.prompt_ids.shape[1] - 1).expand(len(prompt), -1)
    )
    offset = (position - prompt).clamp(0, rollout.response_ids.shape[1] - 1)
    input_ids = torch.where(position < prompt, from_prompt, rollout.response_ids.gather(1, offset))
    input_ids = input_ids.masked_fill(position >= prompt + response, 0)
    step = torch.arange(rollout.response_ids.shape[1], device=prompt.device).unsqueeze(0)
    return input_ids, (prompt - 1 + step).clamp(max=input_ids.shape[1] - 1)
