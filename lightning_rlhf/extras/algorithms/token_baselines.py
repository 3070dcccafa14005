"""Advantages with the baseline of least variance at each token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import discounted_sums
from lightning_rlhf.functional.segments import segment_sum
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.objectives.return_advantages import like_rewards


@dataclass(frozen=True)
class OptimalTokenBaseline(AdvantageEstimator):
    """Baseline of least gradient variance for each position of a group, computed from forward passes alone.

        G_{i,t} = r_t + G_{i,t+1}                      of response i
        e_t = 1 - 2 p_t + sum over v of p_t(v)^2       squared norm of the log-probability's gradient by the logits
        W_{i,t} = sum over s <= t of e_s               times the squared importance weight, if there is one
        B_t = sum over i of G_{i,t} W_{i,t} / sum over i of W_{i,t}
        A_{i,t} = G_{i,t} - B_t,  returns = G

    The sums over i contain the group's responses that reach position t with a policy token. If all W are 0, B is 0. A
    group of one gets no baseline, and its advantages are 0. See "The Optimal Token Baseline: Variance Reduction for
    Long-Horizon LLM-RL", Li et al. 2026.

    Args:
        handle_zero_tail: what happens at positions where only one response of a larger group has a policy token. True
            sets B to 0, so A = G. False sets B to its own G, so A = 0 and the tail of the longest response gives no
            gradient.
    """

    needs_groups: ClassVar[bool] = True
    needs_sum_pi_squared: ClassVar[bool] = True

    handle_zero_tail: bool = True

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :meth:`AdvantageEstimator.__call__`.

        Raises:
            ValueError: log-probabilities or sums of squared probabilities are missing.
        """
        returns = discounted_sums(inputs.token_rewards, inputs.mask)
        advantages = returns - self.baseline(returns, cumulative_energy(inputs), inputs.mask, inputs.group)
        compared = segment_sum(inputs.mask.any(dim=1), inputs.group) > 1
        return like_rewards(inputs, advantages.masked_fill(~(inputs.mask & compared.unsqueeze(1)), 0), returns)

    def baseline(self, returns: Tensor, energy: Tensor, mask: Tensor, group: Tensor) -> Tensor:
        """(B, T) float64 baseline of each position.

        Args:
            returns: (B, T) float64 G, 0 where the mask is False.
            energy: (B, T) float64 W, 0 where the mask is False.
            mask: (B, T) bool.
            group: (B,) int64.
        """
        total = segment_sum(energy, group)
        baseline = torch.where(total > 0, segment_sum(returns * energy, group) / total, 0.0)
        if self.handle_zero_tail:
            baseline = baseline.masked_fill(segment_sum(mask, group) == 1, 0)
        return baseline


@dataclass(frozen=True)
class ToolOptimalTokenBaseline(OptimalTokenBaseline):
    """The optimal token baseline for responses with an environment's tokens: position t is the t-th *policy* token.

    The first token after a tool's answer is therefore compared with tokens after the same number of policy tokens in
    other responses, no matter how long the tools' answers are.

    Args:
        handle_zero_tail: treatment of the tail, see :class:`OptimalTokenBaseline`.
    """

    @override
    def baseline(self, returns: Tensor, energy: Tensor, mask: Tensor, group: Tensor) -> Tensor:
        policy_first = (~mask).long().argsort(dim=1, stable=True)
        returns, energy, mask = (tensor.gather(1, policy_first) for tensor in (returns, energy, mask))
        baseline = super().baseline(returns, energy, mask, group)
        return torch.zeros_like(baseline).scatter(1, policy_first, baseline)


def cumulative_energy(inputs: AdvantageInputs) -> Tensor:
    """(B, T) float64 W of :class:`OptimalTokenBaseline`, 0 where the mask is False.

    Args:
        inputs: inputs with ``logprobs`` and ``sum_pi_squared``.

    Raises:
        ValueError: one of the two is missing.
    """
    if inputs.logprobs is None or inputs.sum_pi_squared is None:
        raise UsageError("the optimal token baseline needs log-probabilities and sums of squared probabilities")
    energy = 1 - 2 * inputs.logprobs.double().exp() + inputs.sum_pi_squared.double()
    energy = energy.clamp(min=0)  # a squared norm, below 0 only by rounding
    if inputs.weights is not None:
        energy = energy * inputs.weights.double() ** 2
    return discounted_sums(energy.flip(1), inputs.mask.flip(1)).flip(1)
