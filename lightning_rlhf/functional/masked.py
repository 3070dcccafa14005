"""Sums and means over the tokens of a mask, exact over ranks."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks


def masked_sum(values: Float[Tensor, "..."], mask: Tensor) -> Tensor:
    """Sum of the values where the mask is True; values outside may be NaN or infinite.

    Args:
        values: any shape.
        mask: bool, the same shape.
    """
    return values.masked_fill(~mask, 0).sum()


def masked_mean(values: Float[Tensor, "..."], mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
    """Mean of the values where the mask is True, over all ranks; 0 where the mask is empty everywhere.

    Args:
        values: any shape.
        mask: bool, the same shape.
        ranks: ranks that hold the other rows.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))  # bfloat16 cannot count beyond 256
    total, count = ranks.sum(torch.stack([masked_sum(values, mask), mask.sum().to(values.dtype)]))
    return total / count.clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
    """Variance (divisor n - 1) of the values where the mask is True, over all ranks; 0 for fewer than two values.

    Two passes, because E[x^2] - E[x]^2 loses every digit when the mean is large.
    """
    squares = masked_centered(values, mask, ranks) ** 2
    total, count = ranks.sum(torch.stack([masked_sum(squares, mask), mask.sum().to(squares.dtype)]))
    return total / (count - 1).clamp(min=1)


def masked_centered(values: Tensor, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
    """Values less their mean over the mask and all ranks.

    Centred twice, because the mean of equal values has a rounding error, which would otherwise count as spread.
    """
    once = values - masked_mean(values, mask, ranks)
    return once - masked_mean(once, mask, ranks)


def masked_whiten(values: Float[Tensor, "..."], mask: Tensor, ranks: DataRanks = ONE_RANK, eps: float = 1e-8) -> Tensor:
    """Values shifted to mean 0 and scaled to variance 1 over the mask and all ranks; 0 where the mask is False.

    Args:
        values: any shape.
        mask: bool, the same shape.
        ranks: ranks that hold the other rows.
        eps: added to the variance, so that equal values give 0 instead of NaN.
    """
    scale = torch.rsqrt(masked_variance(values, mask, ranks) + eps)
    return (masked_centered(values, mask, ranks) * scale).masked_fill(~mask, 0)


def discounted_sums(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float | Float64[Tensor, "B"] = 1.0
) -> Float64[Tensor, "B T"]:
    """Discounted sum of the rewards from each token on: G_t = r_t + gamma G_{t+1}.

    Positions where the mask is False are skipped: t + 1 is the next token inside the mask. The sums of 1, 2, 4, ...
    positions are added up, so that a GPU runs a few kernels for each doubling of the length, and none for each token.

    Args:
        rewards: may be anything where the mask is False.
        gamma: discount per token, in [0, 1], of all responses or of each.

    Returns:
        0 where the mask is False.
    """
    sums = rewards.double().masked_fill(~mask, 0)
    each = gamma.unsqueeze(1) if isinstance(gamma, Tensor) else gamma
    decay = torch.where(mask, each, torch.ones_like(sums))  # of what follows the summed positions
    summed = 1
    while summed < sums.shape[1]:
        sums[:, :-summed] += decay[:, :-summed] * sums[:, summed:]
        decay[:, :-summed] = decay[:, :-summed] * decay[:, summed:]
        summed *= 2
    return sums.masked_fill(~mask, 0)


def next_values(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], final: Float[Tensor, "B"]
) -> Float[Tensor, "B T"]:
    """Value of the next token inside the mask after each position; ``final`` after the last one."""
    width = values.shape[1]
    tokens = torch.arange(width, device=mask.device).expand_as(mask).masked_fill(~mask, width)
    after = tokens.flip(1).cummin(dim=1).values.flip(1) if width else tokens
    index = torch.cat([after[:, 1:], after.new_full((len(mask), min(width, 1)), width)], dim=1)
    return torch.cat([values, final.unsqueeze(1)], dim=1).gather(1, index)


def rewards_at_tokens(
    reward: Float[Tensor, "B"], mask: Bool[Tensor, "B T"], step_rewards: Float[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T"]:
    """Rewards that add up to the reward of each response: at its last policy token, or at given tokens.

    Tokens of an environment after the policy's last token are masked, and a reward there would be lost.

    Args:
        reward: reward of each response.
        mask: True on policy tokens.
        step_rewards: parts of the reward that belong to earlier tokens; None puts the whole reward at the last
            policy token.
    """
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1, keepdim=True)
    steps = torch.zeros_like(mask, dtype=reward.dtype) if step_rewards is None else step_rewards.to(reward.dtype)
    return steps.scatter_add(1, last, (reward - steps.sum(dim=1)).unsqueeze(1))
