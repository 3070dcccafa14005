"""Advantages from a critic, from a teacher, and none."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import masked_whiten
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class NoAdvantages(AdvantageEstimator):
    """Advantages and returns of 0, for losses that do not use rewards."""

    needs_rewards: ClassVar[bool] = False

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :class:`AdvantageEstimator`."""
        return torch.zeros_like(inputs.token_rewards), torch.zeros_like(inputs.token_rewards)


@dataclass(frozen=True)
class TeacherLogRatio(AdvantageEstimator):
    """Advantages by which a policy learns from a teacher, the reference of the module, and from rewards too, if set.

    A_t = log q(y_t) - log p_old(y_t) + reward_coef A_t^rewards,   returns = A, or those of the rewards' estimator,
    with q the teacher and p_old the policy before the first update. The expected gradient of the first term is that of
    the reverse KL, KL(p || q), of the next token. See "MiMo-V2-Flash Technical Report", Xiaomi 2026, section on
    multi-teacher on-policy distillation, and "On-Policy Distillation", Thinking Machines Lab 2025.

    Args:
        rewards: estimator of advantages from rewards; None uses no rewards.
        reward_coef: weight of these advantages.
        clip: largest absolute value of the log-ratio, nats, positive; None does not clip.

    Raises:
        ValueError: an argument is out of range, or the estimator of the rewards needs a reference itself.
    """

    needs_ref: ClassVar[bool] = True

    rewards: AdvantageEstimator | None = None
    reward_coef: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, clip="positive or null", reward_coef="at least 0")
        if isinstance(self.rewards, TeacherLogRatio):
            raise UsageError("rewards of TeacherLogRatio must be an estimator of advantages from rewards, such as GRPO")
        inner = NoAdvantages() if self.rewards is None else self.rewards
        names = ("needs_critic", "needs_groups", "needs_greedy", "needs_sum_pi_squared", "needs_rewards")
        for name in names:  # declared by class attributes otherwise
            object.__setattr__(self, name, getattr(inner, name))
        object.__setattr__(self, "reads_total_reward", self.rewards is not None and inner.reads_total_reward)

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :meth:`AdvantageEstimator.__call__`.

        Raises:
            ValueError: the log-probabilities of policy or reference are missing.
        """
        if inputs.ref_logprobs is None or inputs.logprobs is None:
            raise UsageError("TeacherLogRatio needs the log-probabilities of the policy and of the reference")
        ratio = (inputs.ref_logprobs - inputs.logprobs).masked_fill(~inputs.mask, 0).to(inputs.token_rewards.dtype)
        if self.clip is not None:
            ratio = ratio.clamp(-self.clip, self.clip)
        if self.rewards is None:
            return ratio, ratio
        advantages, returns = self.rewards(inputs, ranks)
        return ratio + self.reward_coef * advantages, returns


@dataclass(frozen=True)
class AdvantagesBySource(AdvantageEstimator):
    """Advantages by a separate estimator for each source of prompts, from the responses of that source alone.

    Advantages and returns of other sources are 0.

    Args:
        estimators: estimator of each source, by its name.
        numbers: number of each source of the data, by its name.

    Raises:
        ValueError: an estimator needs a critic or greedy responses.
    """

    estimators: dict[str, AdvantageEstimator] = field(hash=False)
    numbers: dict[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, estimator in self.estimators.items():
            if estimator.needs_critic or estimator.needs_greedy:
                needed = "a critic" if estimator.needs_critic else "a greedy response to each prompt"
                raise UsageError(
                    f"{type(estimator).__name__} of the source {name!r} needs {needed}, which a mixture does not have: "
                    f"use another estimator, such as GRPO"
                )
        for need in ("needs_groups", "needs_sum_pi_squared", "needs_ref", "needs_rewards", "reads_total_reward"):
            value = any(getattr(estimator, need) for estimator in self.estimators.values())
            object.__setattr__(self, need, value)  # declared by class attributes otherwise

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :meth:`AdvantageEstimator.__call__`."""
        advantages, returns = (torch.zeros_like(inputs.token_rewards) for _ in range(2))
        for name, estimator in self.estimators.items():
            rows = torch.zeros_like(inputs.group, dtype=torch.bool)
            if inputs.source is not None and name in self.numbers:
                rows = inputs.source == self.numbers[name]
            if ranks.sum(rows.sum()):  # on every rank or on none
                advantages[rows], returns[rows] = estimator(inputs.of_rows(rows), ranks)
        return advantages, returns


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """Generalized advantage estimation.

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lambda A_{t+1};   returns = A + V,
    where A is 0 after the last token, and V, too, unless ``bootstrap_truncated``. Positions where the mask is False
    (padding, tokens that an environment wrote) are skipped: they neither decay nor bootstrap, so t + 1 is the next
    *policy* token.
    See "High-Dimensional Continuous Control Using Generalized Advantage Estimation", Schulman et al. 2016, eq. 16.

    With ``critic_lambda`` and ``length_alpha``, returns have a separate lambda, and that of the policy is
    1 - 1 / (alpha l) for a response of l policy tokens, at least 0, so that the reward reaches the first tokens of long
    responses. See "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks", Yue et al. 2025,
    section 4.1 and equation 8, with a critic lambda of 1 and an alpha of 0.05.

    Args:
        gamma: discount per token, in [0, 1].
        gae_lambda: trades bias (0) for variance (1), in [0, 1]; 1 gives Monte Carlo returns.
        whiten: shift and scale the advantages to mean 0, variance 1 over the whole batch and all ranks.
            Returns are computed before.
        bootstrap_truncated: whether the critic's value after the last token replaces 0 there, for responses that the
            length limit cut.
        critic_lambda: lambda of the returns, in [0, 1]; None uses that of the advantages.
        length_alpha: alpha of the length-adaptive lambda of the advantages, positive, which replaces ``gae_lambda``;
            None does not adapt it.
    """

    needs_critic: ClassVar[bool] = True

    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten: bool = True
    bootstrap_truncated: bool = False
    critic_lambda: float | None = None
    length_alpha: float | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda", "critic_lambda"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{name} must lie in [0, 1], got {value}")
        check_ranges(self, length_alpha="positive or null")

    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :meth:`AdvantageEstimator.__call__`.

        Raises:
            ValueError: values are missing, or final values to bootstrap from.
        """
        mask = inputs.mask
        if inputs.values is None:
            raise UsageError("GAE needs the values of a critic")
        dtype = inputs.token_rewards.dtype
        values = inputs.values.double()
        gae_lambda = torch.full_like(values[:, 0], self.gae_lambda)
        if self.length_alpha is not None:
            gae_lambda = (1 - 1 / (self.length_alpha * mask.sum(dim=1).double().clamp(min=1))).clamp(min=0)
        advantages = of_critic = self._sums(inputs, values, gae_lambda)
        if self.critic_lambda is not None:
            of_critic = self._sums(inputs, values, torch.full_like(gae_lambda, self.critic_lambda))
        returns = (of_critic + values).masked_fill(~mask, 0)
        if self.whiten:
            advantages = masked_whiten(advantages, mask, ranks)
        return advantages.to(dtype), returns.to(dtype)

    def _sums(self, inputs: AdvantageInputs, values: Tensor, gae_lambda: Tensor) -> Tensor:
        """Return (B, T) the discounted sums of the differences delta, 0 where the mask is False.

        Args:
            inputs: responses of this rank.
            values: (B, T) float64 values of the critic.
            gae_lambda: (B,) float64 lambda of each response.
        """
        mask = inputs.mask
        token_rewards = inputs.token_rewards.double()  # sums over a response in bfloat16 lose rewards
        advantages = torch.zeros_like(token_rewards)
        next_value = next_advantage = token_rewards.new_zeros(len(token_rewards))
        if self.bootstrap_truncated:
            if inputs.final_values is None:
                raise UsageError("GAE with bootstrap_truncated needs the critic's final values")
            next_value = inputs.final_values.to(next_value.dtype)  # 0 for responses that were not cut
        for t in reversed(range(token_rewards.shape[1])):
            delta = token_rewards[:, t] + self.gamma * next_value - values[:, t]
            advantage = delta + self.gamma * gae_lambda * next_advantage
            next_value = torch.where(mask[:, t], values[:, t], next_value)
            next_advantage = torch.where(mask[:, t], advantage, next_advantage)
            advantages[:, t] = advantage
        return advantages.masked_fill(~mask, 0)
