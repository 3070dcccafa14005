"""Advantages from the rewards of several responses to one prompt, without a critic.

All tokens of a response have the same advantage. A response without a policy token does not count, and a response
without another one to compare with has no baseline: its advantage is 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Float64
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.segments import segment_centered, segment_std, segment_sum
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs
from lightning_rlhf.ranges import check_range


class GroupAdvantage(AdvantageEstimator):
    """Compares whole responses with others to the same prompt. Returns are the responses' rewards."""

    needs_groups: ClassVar[bool] = True

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        advantage = self.of_responses(inputs, inputs.mask.any(dim=1), ranks)
        return over_tokens(advantage, inputs), over_tokens(inputs.reward, inputs)

    @abstractmethod
    def of_responses(
        self, inputs: AdvantageInputs, member: Bool[Tensor, "B"], ranks: DataRanks
    ) -> Float64[Tensor, "B"]:
        """Return the advantage of each response, 0 for responses that are not members.

        Args:
            inputs: responses of this rank.
            member: responses with a policy token.
            ranks: ranks that hold the other rows.
        """


def over_tokens(values: Float[Tensor, "B"], inputs: AdvantageInputs) -> Float[Tensor, "B T"]:
    """Each response's value at all of its policy tokens, 0 elsewhere, in the dtype of the rewards.

    Args:
        inputs: inputs with the mask and dtype.
    """
    return values.unsqueeze(1).to(inputs.token_rewards.dtype).expand_as(inputs.mask).masked_fill(~inputs.mask, 0)


@dataclass(frozen=True)
class GRPO(GroupAdvantage):
    """Group relative advantages: A = (R - mean of the group) / (std of the group + eps).

    The std uses divisor n - 1. Equal rewards give exactly 0. See "DeepSeekMath", Shao et al. 2024, section 4.1.2.

    Args:
        normalize_std: whether to divide by the std. Without it, prompts with little spread in their rewards do not
            count more (Dr. GRPO, "Understanding R1-Zero-Like Training", Liu et al. 2025, section 3.2).
        eps: reward units, positive.
    """

    normalize_std: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_range("eps", self.eps, "positive and finite")

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        centered = segment_centered(inputs.reward, inputs.group, member)
        if not self.normalize_std:
            return centered
        return centered / (segment_std(inputs.reward, inputs.group, member) + self.eps)


@dataclass(frozen=True)
class RLOO(GroupAdvantage):
    """REINFORCE leave-one-out: A = R - mean of the group's other rewards.

    See "Back to Basics: Revisiting REINFORCE Style Optimization", Ahmadian et al. 2024, section 3.2.
    """

    @override
    def of_responses(self, inputs: AdvantageInputs, member: Tensor, ranks: DataRanks) -> Tensor:
        size = segment_sum(member, inputs.group)
        # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1), which is exactly 0 for equal rewards.
        return segment_centered(inputs.reward, inputs.group, member) * size / (size - 1).clamp(min=1)
