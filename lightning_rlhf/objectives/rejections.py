"""Rejection of tokens and responses whose probability differs too much from the rollout policy's."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.mismatch import response_mean
from lightning_rlhf.ranges import check_range


@dataclass(frozen=True)
class Rejection:
    """Rejects tokens or whole responses if their probabilities under trained and rollout policy differ too much.

    With l = log(train / rollout) of a token, clamped to [-20, 20], the statistics are

        k1 = l                  bounded as a ratio: accepted where lower <= exp(k1) <= upper
        k2 = l^2 / 2            accepted where k2 <= upper, nats
        k3 = exp(l) - 1 - l     accepted where k3 <= upper, nats

    See "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", Liu et al. 2025.

    Args:
        statistic: statistic to compare with the bounds.
        level: ``token`` drops tokens. The others drop whole responses, by the sum or mean of the statistic over their
            tokens, or with ``sequence_max`` as soon as one token is out of bounds.
        upper: upper bound, positive. For k1 a ratio train / rollout, else nats.
        lower: lower bound of the ratio train / rollout, positive, only with k1. None is 1 / upper.
    """

    statistic: Literal["k1", "k2", "k3"]
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.statistic not in ("k1", "k2", "k3"):
            raise UsageError(f"statistic must be one of k1, k2, k3, got {self.statistic!r}")
        if self.level not in ("token", "sequence_sum", "sequence_mean", "sequence_max"):
            levels = "token, sequence_sum, sequence_mean, sequence_max"
            raise UsageError(f"level of a rejection must be one of {levels}, got {self.level!r}")
        check_range("upper bound of a rejection", self.upper, "positive")
        if self.statistic != "k1" and self.lower is not None:
            raise UsageError(f"{self.statistic} is never negative and has no lower bound, got {self.lower}")
        if self.statistic == "k1" and not 0 < self._ratio_bounds[0] <= self.upper:
            raise UsageError(f"k1 needs ratio bounds 0 < lower <= upper, got {self._ratio_bounds[0]} and {self.upper}")

    @property
    def name(self) -> str:
        """Name of its metrics."""
        return f"{self.level}_{self.statistic}"

    @property
    def _ratio_bounds(self) -> tuple[float, float]:
        return (1 / self.upper if self.lower is None else self.lower), self.upper

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the statistic itself, nats; k2 and k3 have no lower one."""
        if self.statistic != "k1":
            return -math.inf, self.upper
        low, high = self._ratio_bounds
        return math.log(low), math.log(high)

    def values(self, log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Tensor:
        """The statistic of each token (B, T), or of each response (B,).

        Args:
            log_ratio: log of train / rollout, 0 where the mask is False.
        """
        k3 = torch.expm1(log_ratio) - log_ratio
        values = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": k3}[self.statistic]
        if self.level == "token":
            return values
        if self.level == "sequence_sum":
            return values.sum(dim=1)
        if self.level == "sequence_mean":
            return response_mean(values, mask)
        # The most extreme token: for k1 by l, on the side that exceeds its bound more.
        low, high = self.bounds
        excess = torch.maximum(values - high, low - values).masked_fill(~mask, -math.inf)
        return values.gather(1, excess.argmax(dim=1, keepdim=True)).squeeze(1)

    def keep(self, log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """The tokens of the mask that are accepted.

        Args:
            log_ratio: log of train / rollout, 0 where the mask is False.
        """
        low, high = self.bounds
        values = self.values(log_ratio, mask)
        accepted = (values >= low) & (values <= high)
        return mask & (accepted if self.level == "token" else accepted.unsqueeze(1))
