"""Evaluation of a rollout, and the source of the actor's log-probs before the first update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from typing_extensions import override

from lightning_rlhf.functional.logprobs import TokenScores
from lightning_rlhf.modules.micro_batches import SummedLoss
from lightning_rlhf.types import Experience, Rollout


class OldScores(ABC):
    """Scores of the actor before the first update of a step."""

    @abstractmethod
    def evaluate(self, rollout: Rollout) -> TokenScores:
        """Return the scores of a rollout, or placeholders where they are computed later. All ranks."""

    def losses(self, losses: dict[str, SummedLoss]) -> dict[str, SummedLoss]:
        """Return the losses of a mini-batch, which may compute scores too."""
        return losses

    def complete(self, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation with the scores that losses have computed. All ranks."""
        return evaluation


@dataclass(frozen=True)
class SeparatePass(OldScores):
    """Scores from a forward pass over all responses.

    Args:
        score: function that evaluates the actor on a rollout.
    """

    score: Callable[[Rollout], TokenScores]

    @override
    def evaluate(self, rollout: Rollout) -> TokenScores:
        return self.score(rollout)


@dataclass(frozen=True)
class EngineScores(OldScores):
    """Log-probs of the engine in place of the actor's; there are no entropies."""

    @override
    def evaluate(self, rollout: Rollout) -> TokenScores:
        return TokenScores(rollout.rollout_logprobs, torch.zeros_like(rollout.rollout_logprobs))


@dataclass(frozen=True)
class Evaluation:
    """Result of the models on the rollout of a step.

    Args:
        experience: rollout with all inputs of the losses.
        metrics: metrics over all ranks that the experience does not contain.
        old_scores: source of the old log-probs.
        reward_wait: seconds in which the evaluation waited for rewards.
    """

    experience: Experience
    metrics: dict[str, float]
    old_scores: OldScores
    reward_wait: float = 0.0

    def completed(self) -> Evaluation:
        """Return the evaluation with the old scores that the updates have computed. All ranks."""
        return self.old_scores.complete(self)
