"""Rows laid behind each other without padding, so that no forward pass spends time on it."""

import torch
from torch import Tensor


def pack(input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows behind each other; positions that start again at 0 are what keeps them apart.

    Args:
        input_ids: (B, L) int64, right-padded.
        lengths: (B,) int64, in [1, L].

    Returns:
        packed: (1, N) int64, the N real tokens.
        positions: (1, N) int64, of each within its own row.
        starts: (B,) int64, where in the packed row each row begins.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    real = position < lengths.unsqueeze(1)
    return input_ids[real].unsqueeze(0), position[real].unsqueeze(0), lengths.cumsum(0) - lengths
