"""Shaping of a reward model's score, and a penalty for long responses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_range


@dataclass(frozen=True)
class ScoreShaping:
    """Clips and weights a reward model's score, and sets the score of truncated responses.

    Args:
        weight: factor of the shaped score in the sum of rewards.
        clip: bound of the score, positive. Scores are clipped to [-clip, clip]. None: no clipping.
        truncated_score: score of a response that reached the length limit, before clipping and weight. None uses the
            model's score.
    """

    weight: float = 1.0
    clip: float | None = None
    truncated_score: float | None = None

    def __post_init__(self) -> None:
        check_range("score clip", self.clip, "positive or null")

    def __call__(self, scores: Tensor, truncated: Tensor) -> Tensor:
        """Shape and weight scores.

        Args:
            scores: (B,) scores of the reward model.
            truncated: (B,) bool, True where the response reached the length limit.

        Returns:
            (B,) shaped scores.
        """
        if self.truncated_score is not None:
            scores = torch.where(truncated, torch.full_like(scores, self.truncated_score), scores)
        if self.clip is not None:
            scores = scores.clamp(-self.clip, self.clip)
        return self.weight * scores


@dataclass(frozen=True)
class OverlongPenalty:
    """A reward that decreases to -1 as a response approaches the length limit ("DAPO", Yu et al. 2025, eq. 13).

    It is 0 up to ``max_tokens - buffer_tokens``, then linear to -1 at ``max_tokens``. Add it to the rewards of
    RolloutLoop, and set the strength of the penalty with its weight there.

    Args:
        max_tokens: length limit of a response, tokens.
        buffer_tokens: length of the slope, in [1, max_tokens].
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.buffer_tokens <= self.max_tokens:
            raise UsageError(f"buffer_tokens must be in [1, max_tokens={self.max_tokens}], got {self.buffer_tokens}")

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        """Compute one number in [-1, 0] per completion.

        Args:
            completion_ids: token ids of each response.
        """
        start = self.max_tokens - self.buffer_tokens
        return [-min(max((len(ids) - start) / self.buffer_tokens, 0.0), 1.0) for ids in completion_ids]
