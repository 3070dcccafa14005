"""Sums of rewards from a token on."""

import torch
from torch import Tensor


def discounted_sums(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Of each token, its reward plus the discounted rewards of the tokens after it: G_t = r_t + gamma G_{t+1}.

    Positions where the mask is False are passed over: t + 1 is the next token inside the mask.

    Args:
        rewards: (B, T) may be anything where the mask is False.
        mask: (B, T) bool.
        gamma: discount per token, in [0, 1].

    Returns:
        (B, T) float64, 0 where the mask is False.
    """
    rewards = rewards.double()
    sums = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = torch.where(mask[:, t], rewards[:, t] + gamma * ahead, ahead)
        sums[:, t] = ahead
    return sums.masked_fill(~mask, 0)
