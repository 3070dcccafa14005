"""Rows concatenated without padding, so that a forward pass computes no padding."""

import torch
from torch import Tensor


def pack(input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate rows; positions that restart at 0 separate them.

    Args:
        input_ids: (B, L) int64, right-padded.
        lengths: (B,) int64, in [1, L].

    Returns:
        packed: (1, N) int64, the N real tokens.
        positions: (1, N) int64, position of each token in its row.
        starts: (B,) int64, position in the packed row at which each row begins.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    real = position < lengths.unsqueeze(1)
    return input_ids[real].unsqueeze(0), position[real].unsqueeze(0), lengths.cumsum(0) - lengths
