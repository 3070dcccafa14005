"""Advantages from a teacher, and none."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class NoAdvantages(AdvantageEstimator):
    """Advantages and returns of 0, for losses that do not use rewards."""

    needs_rewards: ClassVar[bool] = False

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(inputs.token_rewards), torch.zeros_like(inputs.token_rewards)


@dataclass(frozen=True)
class TeacherLogRatio(AdvantageEstimator):
    """Advantages for learning from a teacher, the reference of the module, and from rewards too if you set them.

        A_t = log q(y_t) - log p_old(y_t) + reward_coef A_t^rewards

    q is the teacher and p_old the policy before the first update. Returns are A, or the returns of the rewards'
    estimator. In expectation, the first term's gradient is the gradient of the reverse KL, KL(p || q), of the next
    token. See "MiMo-V2-Flash Technical Report", Xiaomi 2026, section on multi-teacher on-policy distillation, and
    "On-Policy Distillation", Thinking Machines Lab 2025.

    Args:
        rewards: estimator of advantages from rewards. None uses no rewards.
        reward_coef: weight of these advantages.
        clip: largest absolute value of the log-ratio, nats, positive. None does not clip.

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

    @override
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
