"""Advantages of each token from the rewards after it, without a critic."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import discounted_sums, masked_whiten
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++: rewards-to-go, whitened over all policy tokens of the batch and all ranks.

        G_t = r_t + gamma G_{t+1}
        A = (G - mean) / std
        returns = G

    Here t + 1 is the next *policy* token. See "REINFORCE++", Hu et al. 2025.

    Args:
        gamma: discount per token, in [0, 1].
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, gamma="in [0, 1]")

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        returns = discounted_sums(inputs.token_rewards, inputs.mask, self.gamma)
        return like_rewards(inputs, masked_whiten(returns, inputs.mask, ranks), returns)


@dataclass(frozen=True)
class ReMax(AdvantageEstimator):
    """Rewards-to-go minus the reward of the greedy response to the same prompt.

        G_t = r_t + G_{t+1}
        A_t = G_t - R(greedy)
        returns = G

    See "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models", Li
    et al. 2024, section 4.
    """

    needs_greedy: ClassVar[bool] = True

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        """See :meth:`AdvantageEstimator.__call__`.

        Raises:
            ValueError: the rewards of the greedy responses are missing.
        """
        if inputs.greedy_reward is None:
            raise UsageError("ReMax needs the reward of a greedy response to each prompt")
        returns = discounted_sums(inputs.token_rewards, inputs.mask)
        advantages = (returns - inputs.greedy_reward.unsqueeze(1)).masked_fill(~inputs.mask, 0)
        return like_rewards(inputs, advantages, returns)


def like_rewards(inputs: AdvantageInputs, advantages: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns in the dtype of the rewards."""
    dtype = inputs.token_rewards.dtype
    return advantages.to(dtype), returns.to(dtype)
