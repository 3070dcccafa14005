"""Resampling of the responses to train on."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_ranges

Method = Literal["pow", "max_min", "max_random"]


@dataclass(frozen=True)
class ScoreResampling:
    """Policy filtration: draws rows of a batch with replacement, and more often the ones with reliable scores.

    The probability of a row is proportional to w + 1e-8. The method sets w:

        pow          (|score| / largest |score|)^power
        max_min      1 for the largest and the smallest score, 0 for others
        max_random   0.4 for the largest score, 0.1 for others

    If several rows share the largest or smallest score, all of them get its weight.
    See "Policy Filtration for RLHF to Mitigate Noise in Reward Models", Shen and Zhang 2024 (PF-PPO).

    Args:
        method: ``pow``, ``max_min`` or ``max_random``.
        power: exponent of ``pow``, at least 0. 0 draws all rows with equal probability.
    """

    method: Method = "pow"
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.method not in ("pow", "max_min", "max_random"):
            raise UsageError(f"method must be one of pow, max_min, max_random, got {self.method!r}")
        check_ranges(self, power="at least 0")

    def __call__(self, scores: Float[Tensor, "B"], generator: torch.Generator, count: int | None = None) -> Tensor:
        """Numbers of the rows to train on; empty for an empty batch.

        Args:
            scores: finite, of all rows that may be drawn.
            generator: random generator on the CPU, so that a seed gives the same rows everywhere.
            count: number of draws, at least 1; None draws as many as there are scores.

        Returns:
            (count,) int64 in [0, B).

        Raises:
            ValueError: a score is not finite.
        """
        if not scores.isfinite().all():
            raise UsageError(f"scores must be finite, got {scores.tolist()}")
        if not len(scores):
            return torch.zeros(0, dtype=torch.int64, device=scores.device)
        weights = self.weights(scores.detach().double().cpu()) + 1e-8
        return torch.multinomial(weights, count or len(scores), replacement=True, generator=generator).to(scores.device)

    def weights(self, scores: Float[Tensor, "B"]) -> Float64[Tensor, "B"]:
        """The weight w of each row.

        Args:
            scores: finite, at least one.
        """
        if self.method == "pow":
            # Divided by the largest, so that large scores do not overflow; the distribution is the same.
            size = scores.double().abs()
            return (size / size.max().clamp(min=torch.finfo(torch.float64).tiny)) ** self.power
        best = scores == scores.max()
        if self.method == "max_min":
            return (best | (scores == scores.min())).double()
        return 0.1 + 0.3 * best.double()
