"""Rarer advantages from the rewards of several responses to one prompt."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import (
    masked_centered,
    masked_variance,
    masked_whiten,
)
from lightning_rlhf.functional.segments import segment_centered, segment_max, segment_std, segment_sum
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.objectives.group_advantages import GRPO, GroupAdvantage
from lightning_rlhf.ranges import check_range


@dataclass(frozen=True)
class GRPOPassK(GRPO):
    """Gives an advantage only to the best response of a group: how much the group's maximum falls without it.

        A = largest R - second largest R    for the best response, 0 for the others

    With ``normalize_std``, A is divided by (std of the group + eps). If several responses share the largest reward, all
    get 0. See "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", Tang et al.
    2025.

    Args:
        normalize_std: divide by the std, as in :class:`GRPO`.
        eps: reward units, positive.
    """

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        reward = inputs.reward.double().masked_fill(~member, -math.inf)
        best = member & (reward == segment_max(reward, inputs.group))
        second = segment_max(reward.masked_fill(best, -math.inf), inputs.group)
        alone = best & (segment_sum(best, inputs.group) == 1) & (second > -math.inf)
        gap = torch.where(alone, reward - second, 0.0)
        if not self.normalize_std:
            return gap
        return gap / (segment_std(inputs.reward, inputs.group, member) + self.eps)


@dataclass(frozen=True)
class MaxRL(GroupAdvantage):
    """Maximum likelihood with rewards of 0 and 1: A = (R - mean of the group) / mean of the group.

    Prompts with few correct answers count more, because the gradient of log P(correct) weights a prompt by 1 /
    P(correct). Use rewards that are at least 0. Where the mean is not above eps, A is 0.
    See "Maximum Likelihood Reinforcement Learning", Tajwar et al. 2026, section 4.

    Args:
        eps: reward units, positive.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("eps", self.eps, "positive and finite")

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        size = segment_sum(member, inputs.group)
        mean = segment_sum(inputs.reward.double() * member, inputs.group) / size.clamp(min=1)
        centered = segment_centered(inputs.reward, inputs.group, member)
        return torch.where(mean > self.eps, centered / mean.clamp(min=self.eps), 0.0)


@dataclass(frozen=True)
class OPO(GroupAdvantage):
    """The baseline of least gradient variance, if gradients grow with length: A = R - sum(l R) / sum(l).

    l is the number of a response's policy tokens.
    See "On-Policy RL with Optimal Reward Baseline", Hao et al. 2025.
    """

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        return segment_centered(inputs.reward, inputs.group, inputs.mask.sum(dim=1))


@dataclass(frozen=True)
class GPG(GroupAdvantage):
    """Group policy gradient: A = alpha (R - mean of the group), alpha = B / (B - M).

    B is the number of responses in the whole batch and all ranks. M of them are in groups with equal rewards. Such
    groups give no gradient and reduce its mean over the batch, and alpha compensates for that. See "GPG: A Simple and
    Strong Reinforcement Learning Baseline for Model Reasoning", Chu et al. 2025, section 2.
    """

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        centered = segment_centered(inputs.reward, inputs.group, member)
        varied = member & (segment_max(centered.abs(), inputs.group) > 0)
        counts = ranks.sum(torch.stack([member.sum(), varied.sum()]).double())
        return centered * (counts[0] / counts[1].clamp(min=1))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GroupAdvantage):
    """REINFORCE++ with the group's mean as baseline: A = R - mean of the group, whitened over all policy tokens.

    Mean and variance are taken over the whole batch and all ranks, so that easy and hard prompts are scaled alike.
    See "REINFORCE++", Hu et al. 2025.
    """

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        centered = segment_centered(inputs.reward, inputs.group, member)
        compared = member & (segment_sum(member, inputs.group) > 1)
        tokens = inputs.mask & compared.unsqueeze(1)
        whitened = masked_whiten(centered.unsqueeze(1).expand_as(tokens), tokens, ranks)
        return whitened.sum(dim=1) / tokens.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class GDPO(GroupAdvantage):
    """Normalises each of several rewards within its group before adding them, so that none dominates the others.

        A_k = (R_k - mean of the group) / (std of the group + eps)    for each reward k
        S = sum over k of w_k A_k
        A = (S - mean of the batch) / (std of the batch + eps)        over the whole batch and all ranks

    See "GDPO: Group reward-Decoupled Normalization Policy Optimization", Liu et al. 2026.

    A reward that is NaN did not apply. The response then does not count in this reward's mean and std, and the reward
    adds nothing to the response. A response that no reward compares with another gets advantage 0 and does not count in
    the batch. Only ``rewards`` are used, so a KL penalty in the token rewards does nothing here.

    Args:
        reward_keys: names of the rewards to use.
        reward_weights: w_k, one for each name, finite. None is 1 for all.
        eps: added to the rewards' standard deviation, reward units, and to the batch's, no unit. Positive.
    """

    reads_total_reward: ClassVar[bool] = False

    reward_keys: tuple[str, ...]
    reward_weights: tuple[float, ...] | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("eps", self.eps, "positive and finite")
        if not self.reward_keys:
            raise UsageError("reward_keys must name at least one reward, got none")
        weights = self.reward_weights
        if weights is not None and (len(weights) != len(self.reward_keys) or not all(map(math.isfinite, weights))):
            raise UsageError(
                f"reward_weights must be one finite number for each of {list(self.reward_keys)}, got {list(weights)}"
            )

    def has_reward(self, reward: Tensor, rewards: Mapping[str, Tensor]) -> Tensor:
        """Return (B,) bool, the responses to which one of the rewards applies."""
        applies = [~rewards[key].isnan() for key in self.reward_keys if key in rewards]
        return torch.stack(applies).any(dim=0) if applies else torch.ones_like(reward, dtype=torch.bool)

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        if missing := [key for key in self.reward_keys if key not in inputs.rewards]:
            raise UsageError(f"GDPO needs rewards named {missing}, got {sorted(inputs.rewards)}")
        total = torch.zeros(len(member), dtype=torch.float64, device=member.device)
        compared = torch.zeros_like(member)
        for key, weight in zip(self.reward_keys, self.reward_weights or [1.0] * len(self.reward_keys), strict=True):
            reward = inputs.rewards[key]
            applies = member & ~reward.isnan()
            centered = segment_centered(reward, inputs.group, applies)
            total += weight * centered / (segment_std(reward, inputs.group, applies) + self.eps)
            compared |= applies & (segment_sum(applies, inputs.group) > 1)
        scale = masked_variance(total, compared, ranks).sqrt() + self.eps
        return (masked_centered(total, compared, ranks) / scale).masked_fill(~compared, 0)


@dataclass(frozen=True)
class BestAgainstWorst(AdvantageEstimator):
    """1 for the response of each prompt with the highest reward, -1 for the one with the lowest, 0 for all others.

    Among equal rewards the first response counts. If all rewards are equal, all responses get 0. A response that is not
    included gets 0, and its reward is not compared.
    See "Direct Language Model Alignment from Online AI Feedback", Guo et al. 2024, section 3, with two responses.
    """

    needs_groups = True

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """Both results are the marks."""
        reward = inputs.reward
        marks = torch.zeros_like(reward)
        included = inputs.mask.any(dim=1)
        for number in inputs.group[included].unique():
            rows = (included & (inputs.group == number)).nonzero().squeeze(1)
            best, worst = rows[reward[rows].argmax()], rows[reward[rows].argmin()]
            if reward[best] > reward[worst]:
                marks[best], marks[worst] = 1, -1
        spread = marks.unsqueeze(1) * inputs.mask
        return spread, spread
