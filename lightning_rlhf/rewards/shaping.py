"""What becomes of a reward model's score before it is a reward."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreShaping:
    """Clipping and weight of a reward model's score, and the score of a response that never ended.

    Args:
        weight: multiplies the shaped score before it is added to the other rewards.
        clip: scores are clipped to [-clip, clip], positive; None leaves them.
        truncated_score: replaces the score of a response that the length limit cut, and is then clipped and weighted
            like any other; None keeps the model's own.
    """

    weight: float = 1.0
    clip: float | None = None
    truncated_score: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"score clip must be positive or null, got {self.clip}")

    def __call__(self, scores: Tensor, truncated: Tensor) -> Tensor:
        """Shaped and weighted scores.

        Args:
            scores: (B,) the reward model's.
            truncated: (B,) bool, True where the length limit cut the response.

        Returns:
            (B,) reward units.
        """
        if self.truncated_score is not None:
            scores = torch.where(truncated, torch.full_like(scores, self.truncated_score), scores)
        if self.clip is not None:
            scores = scores.clamp(-self.clip, self.clip)
        return self.weight * scores
