"""ECHO: reinforcement learning beside a supervised loss of the tokens that an environment wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.functional.logprobs import ActorScores, TokenScores
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.algorithms import GRPOModule
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.ranges import check_range
from lightning_rlhf.types import Experience, Rollout


class ECHOModule(GRPOModule):
    """GRPO that also learns to predict what an environment wrote, such as the results of tools.

        L = policy loss + environment_coef * (sum of -log p over the environment's tokens) / (their number)

    Their number is counted in the mini-batch and over all ranks. The policy learns to predict the environment even
    where all rewards of a group are equal. Tokens of images do not count, only the tokens around them. prime-rl calls
    this ECHO, but we did not compare its divisor.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        environment_coef: weight of the cross-entropy, at least 0.
        **kwargs: arguments of :class:`~lightning_rlhf.GRPOModule`.
    """

    def __init__(self, actor: str | ModelSource, environment_coef: float = 0.1, **kwargs: Any) -> None:
        super().__init__(actor, **kwargs)
        check_range("environment_coef", environment_coef, "at least 0")
        self.environment_coef = environment_coef

    @property
    def reuses_first_forward(self) -> bool:
        """False: the loss evaluates other tokens than the policy loss."""
        return False

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """Yield mini-batches with the factor of the environment's tokens; see :meth:`RLHFModule.minibatches`."""
        for minibatch in super().minibatches(experience):
            count = self.data_ranks.sum(environment_mask(minibatch.rollout, self.image_tokens).sum()).clamp(min=1)
            factor = self.environment_coef * self.denominator(minibatch) / count  # update() divides by the denominator
            yield replace(minibatch, scale=factor.expand(len(minibatch)))

    def update_scores(self, rows: Experience) -> ActorScores:
        """Return the actor's scores of the tokens of policy and environment, with gradient. All ranks."""
        mask = rows.rollout.response_mask | environment_mask(rows.rollout, self.image_tokens)
        scores: TokenScores = self.call_language_model("actor", rows.rollout, mask)
        return scores

    def policy_objective(self, rows: Experience, scores: ActorScores, means: MeanAccumulator) -> Tensor:
        """Return the losses of the tokens of policy and environment, summed over some rows."""
        written = environment_mask(rows.rollout, self.image_tokens)
        means.add("loss/environment", -scores.logprobs, written)
        assert rows.scale is not None
        supervised = -(scores.logprobs.masked_fill(~written, 0) * rows.scale.unsqueeze(1)).sum()
        return super().policy_objective(rows, scores, means) + supervised


def environment_mask(rollout: Rollout, image_tokens: Sequence[int] = ()) -> Tensor:
    """Return (B, T) bool, the tokens that an environment wrote after other tokens, of the included rows.

    Args:
        rollout: rollout with conversations.
        image_tokens: tokens that stand for images, which are left out.
    """
    numbers = torch.arange(rollout.response_ids.shape[1], device=rollout.response_ids.device)
    in_response = numbers < rollout.response_lengths.unsqueeze(1)
    mask = in_response & ~rollout.response_mask & rollout.included.unsqueeze(1)
    for token in image_tokens:
        mask &= rollout.response_ids != token
    if rollout.text_starts is None:
        return mask
    return mask & ~rollout.text_starts  # the first token of a text is not predicted
