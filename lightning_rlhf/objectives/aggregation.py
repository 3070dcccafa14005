"""Reduction of the losses of tokens to one loss: the weight of each token, and the denominator.

The denominator is counted over a whole mini-batch and all ranks, so that neither micro-batches nor ranks change the
gradient. A response without a policy token does not count.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.ranges import check_ranges


class Aggregation(ABC):
    """loss = sum over tokens of weight x loss / denominator."""

    def weights(self, mask: Bool[Tensor, "B T"]) -> Float64[Tensor, "B T"]:
        """Weight of each token, 0 where the mask is False; each row separately. Here 1 per token."""
        return mask.double()

    @abstractmethod
    def denominator(self, mask: Bool[Tensor, "B T"], ranks: DataRanks = ONE_RANK) -> Tensor:
        """() float64 denominator of the weighted sum over a mini-batch, positive also without any token.

        Args:
            mask: tokens that count, of the whole mini-batch on this rank.
            ranks: ranks that hold the other rows.
        """


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Every token counts the same, so long responses count more ("DAPO", Yu et al. 2025, eq. 12)."""

    def denominator(self, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
        """Number of tokens."""
        return ranks.sum(mask.sum().double()).clamp(min=1)


@dataclass(frozen=True)
class TokenSum(Aggregation):
    """The plain sum: the gradient grows with the mini-batch."""

    def denominator(self, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
        """1: losses are summed."""
        return torch.ones((), dtype=torch.float64, device=mask.device)


@dataclass(frozen=True)
class SequenceMeanTokenSum(Aggregation):
    """The mean over responses of the sum over their tokens, divided by a constant.

    With ``scale`` set to the longest response that your run allows, this is Dr. GRPO's loss ("Understanding
    R1-Zero-Like Training", Liu et al. 2025, section 3.2), which prefers neither short nor long answers. The scale is a
    constant and never the width of a padded batch, because that would change the gradient from step to step.

    Args:
        scale: divides each token's loss, positive. 1 is the plain sum.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, scale="positive and finite")

    def denominator(self, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
        """Number of responses times ``scale``."""
        return _responses(mask, ranks) * self.scale


@dataclass(frozen=True)
class SequenceMeanTokenMean(Aggregation):
    """The mean over responses of the mean over their tokens ("DeepSeekMath", Shao et al. 2024, eq. 3)."""

    @override
    def weights(self, mask: Tensor) -> Tensor:
        return mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1)

    def denominator(self, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
        """Number of responses."""
        return _responses(mask, ranks)


def _responses(mask: Tensor, ranks: DataRanks) -> Tensor:
    return ranks.sum(mask.any(dim=1).sum().double()).clamp(min=1)
