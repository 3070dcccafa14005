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


@dataclass(frozen=True)
class OverlongPenalty:
    """A reward function that grows negative as a response nears the length limit ("DAPO", Yu et al. 2025, eq. 13).

    0 up to ``max_tokens - buffer_tokens``; from there a straight line to -1 at ``max_tokens``.
    Give it to RolloutLoop among the rewards, its strength as their weight.

    Args:
        max_tokens: longest response, tokens.
        buffer_tokens: length of the slope, in [1, max_tokens].
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.buffer_tokens <= self.max_tokens:
            raise ValueError(f"buffer_tokens must lie in [1, max_tokens={self.max_tokens}], got {self.buffer_tokens}")

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        """One number in [-1, 0] per completion.

        Args:
            completion_ids: the responses' tokens.
        """
        start = self.max_tokens - self.buffer_tokens
        return [-min(max((len(ids) - start) / self.buffer_tokens, 0.0), 1.0) for ids in completion_ids]
