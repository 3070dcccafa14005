"""Advantages from a critic."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import discounted_sums, masked_whiten, next_values
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """Generalized advantage estimation, the usual estimator with a critic.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lambda A_{t+1}
        returns = A + V

    After the last token A is 0, and V is 0, too, unless ``bootstrap_truncated``. Positions where the mask is False
    (padding, tokens that an environment wrote) are skipped. They neither decay nor bootstrap, so t + 1 is the next
    *policy* token. See "High-Dimensional Continuous Control Using Generalized Advantage Estimation", Schulman et al.
    2016, eq. 16.

    For long responses, you can set ``critic_lambda`` and ``length_alpha``. Returns then use their own lambda, and the
    policy's lambda is 1 - 1 / (alpha l) for a response of l policy tokens, at least 0, so that the reward reaches the
    first tokens. See "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks", Yue et al.
    2025, section 4.1 and equation 8, with a critic lambda of 1 and an alpha of 0.05.

    Args:
        gamma: discount per token, in [0, 1].
        gae_lambda: trades bias (0) for variance (1), in [0, 1]. 1 gives Monte Carlo returns.
        whiten: whether to shift and scale the advantages to mean 0, variance 1 over the whole batch and all ranks.
            Returns are computed before.
        bootstrap_truncated: whether the critic's value after the last token replaces 0 there, for responses that the
            length limit cut.
        critic_lambda: lambda of the returns, in [0, 1]. None uses the lambda of the advantages.
        length_alpha: alpha of the length-adaptive lambda of the advantages, positive. It replaces ``gae_lambda``. None
            does not adapt it.
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

    @override
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

    def _sums(
        self, inputs: AdvantageInputs, values: Float64[Tensor, "B T"], gae_lambda: Float64[Tensor, "B"]
    ) -> Float[Tensor, "B T"]:
        """The discounted sums of the differences delta, 0 where the mask is False.

        Args:
            inputs: responses of this rank.
            values: values of the critic.
            gae_lambda: lambda of each response.
        """
        mask = inputs.mask
        token_rewards = inputs.token_rewards.double()  # sums over a response in bfloat16 lose rewards
        final = token_rewards.new_zeros(len(token_rewards))
        if self.bootstrap_truncated:
            if inputs.final_values is None:
                raise UsageError("GAE with bootstrap_truncated needs the critic's final values")
            final = inputs.final_values.to(final.dtype)  # 0 for responses that were not cut
        deltas = token_rewards + self.gamma * next_values(values, mask, final) - values
        return discounted_sums(deltas, mask, self.gamma * gae_lambda)
