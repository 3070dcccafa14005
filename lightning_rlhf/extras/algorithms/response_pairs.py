"""Algorithms that learn from pairs of the policy's responses to one prompt: online DPO and REBEL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import concatenate
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.group_advantages import BestAgainstWorst
from lightning_rlhf.extras.algorithms.preference_losses import DirectLoss, DPOLoss, REBELLoss
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.evaluation import Evaluation
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.micro_batches import SummedLoss
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator, approx_kl, log_ratio_of
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.types import Experience, StepRollout, TensorBatch


@dataclass(frozen=True)
class ExperiencePairs(TensorBatch):
    """Pairs of responses to the same prompt.

    Args:
        first: first response of each pair; the better one where the pair is ordered by reward.
        second: second response of each pair.
        included: (B,) bool, False for pairs that the loss leaves out.
    """

    first: Experience
    second: Experience
    included: Tensor

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of both responses with their prompt, when padded to the longer one."""
        return 2 * torch.maximum(self.first.total_lengths, self.second.total_lengths)

    @property
    def mask(self) -> Tensor:
        """(B,) bool, the pairs to learn from."""
        return self.included


class ResponsePairsModule(RLHFModule):
    """Base of modules whose loss compares two responses to the same prompt.

    A subclass selects pairs in :meth:`select_training_rows` and computes their losses in :meth:`losses_of_pairs`.
    ``minibatch_size`` counts responses as everywhere and must be a multiple of ``group_size``, so that no group is
    split.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator that orders the responses to a prompt by their rewards.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    has_pairs = True
    has_entropy_bonus = False

    def __init__(self, actor: str | ModelSource, advantages: AdvantageEstimator, **kwargs: Any) -> None:
        super().__init__(
            actor,
            advantages=advantages,
            policy_loss=ClippedPolicyLoss(),
            aggregation=TokenMean(),
            correction=None,
            kl_loss=KLTerm(),
            ent_coef=0.0,
            **kwargs,
        )

    def setup(self, stage: str) -> None:
        """Raise for mini-batches that would split groups, or leave a rank without one."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        sizes = {getattr(callback, "group_size", 1) for callback in callbacks}
        for size in sizes - {1}:
            if self.minibatch_size % size or self.minibatch_size // size < self.data_ranks.size:
                raise UsageError(
                    f"minibatch_size {self.minibatch_size} must be a multiple of group_size {size} with a prompt for "
                    f"each of {self.data_ranks.size} ranks: use a multiple of {size * self.data_ranks.size}"
                )

    def evaluate(self, received: StepRollout) -> Evaluation:
        """Evaluate a rollout with the same number of responses to every prompt; see :meth:`RLHFModule.evaluate`."""
        sizes = received.rollout.group.unique(return_counts=True)[1]
        self.group_size = int(sizes[0])
        if self.group_size < 2 or bool((sizes != self.group_size).any()):
            raise UsageError(
                f"all prompts must have the same number (>= 2) of responses, got {sizes.unique().tolist()}"
            )
        return super().evaluate(received)

    def losses_of_pairs(self, rows: ExperiencePairs, logprobs: Tensor, means: MeanAccumulator) -> Tensor:
        """Compute the (B,) loss of each pair and record its metrics.

        Args:
            rows: B pairs.
            logprobs: (2 B, T) actor's log-probabilities of the first responses, then of the second; 0 where the
                response mask is False.
            means: accumulator of metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must compute the loss of a pair: override losses_of_pairs")

    def losses(self) -> dict[str, SummedLoss]:
        """Return the loss of the actor."""
        return {"actor": self.pair_loss}

    def denominator(self, minibatch: ExperiencePairs) -> Tensor:
        """Return () the number of pairs of all ranks. All ranks."""
        return self.data_ranks.sum(minibatch.included.sum())

    def pair_loss(self, rows: ExperiencePairs, means: MeanAccumulator) -> Tensor:
        """Compute the loss, summed over some pairs."""
        both = concatenate([rows.first.rollout, rows.second.rollout])
        old_logprobs = torch.cat([rows.first.old_logprobs, rows.second.old_logprobs])
        logprobs = self.actor_scores("actor", both).logprobs
        losses = self.losses_of_pairs(rows, logprobs, means)
        means.add("train/loss", losses, rows.included)
        counted = both.response_mask & rows.included.repeat(2).unsqueeze(1)
        means.add_approx_kl(approx_kl(log_ratio_of(logprobs, old_logprobs)), counted)
        return losses.masked_fill(~rows.included, 0).sum()


class OnlineDPOModule(ResponsePairsModule):
    """DPO on pairs of the policy's own responses: the best and the worst response to each prompt by reward.

    Rewards come from reward functions, a reward model, or both. Only their order matters. If all responses to a prompt
    get the same reward, the prompt is left out and counted in ``train/tied_fraction``.
    See "Direct Language Model Alignment from Online AI Feedback", Guo et al. 2024.

    ``minibatch_size`` counts responses, not pairs. For example, with a ``group_size`` of 8, 64 responses are 8 pairs.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        loss: loss of a pair from its log-ratios.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    needs_ref = True

    def __init__(self, actor: str | ModelSource, loss: DirectLoss = DPOLoss(), **kwargs: Any) -> None:
        if not loss.uses_reference:
            raise UsageError(
                f"OnlineDPOModule compares with a reference, which {type(loss).__name__} does not use: use another loss"
            )
        super().__init__(actor, BestAgainstWorst(), kl_reward=KLTerm(), **kwargs)
        self.loss = loss

    def evaluate(self, received: StepRollout) -> Evaluation:
        """Evaluate a rollout, and measure the fraction of prompts that are left out. All ranks."""
        evaluation = super().evaluate(received)
        decided = is_decided(self.marks(evaluation.experience))
        tied, prompts = self.data_ranks.sum(torch.stack([(~decided).sum(), torch.ones_like(decided).sum()]))
        return replace(evaluation, metrics={**evaluation.metrics, "train/tied_fraction": float(tied / prompts)})

    def marks(self, experience: Experience) -> Tensor:
        """Return (prompts, G): 1 for the best response to each prompt, -1 for the worst, 0 for others."""
        return experience.advantages.sum(dim=1).sign().view(-1, self.group_size)

    def select_training_rows(self, experience: Experience) -> ExperiencePairs:
        """Return the best and the worst response to each prompt. All ranks."""
        marks = self.marks(experience)
        start = torch.arange(len(marks), device=marks.device) * self.group_size
        best = start + marks.argmax(dim=1)
        worst = start + marks.argmin(dim=1)
        return ExperiencePairs(experience[best], experience[worst], is_decided(marks))

    def losses_of_pairs(self, rows: ExperiencePairs, logprobs: Tensor, means: MeanAccumulator) -> Tensor:
        """Compute the (B,) preference loss of each pair; see :meth:`ResponsePairsModule.losses_of_pairs`."""
        ref_logprobs = torch.cat([rows.first.ref_logprobs, rows.second.ref_logprobs])
        mask = torch.cat([rows.first.rollout.response_mask, rows.second.rollout.response_mask])
        summed = logprobs.sum(dim=1)
        ratios = summed - ref_logprobs.sum(dim=1)
        tokens = mask.sum(dim=1).clamp(min=1)
        chosen, rejected = (ratios / tokens if self.loss.length_normalized else ratios).chunk(2)
        rewards = self.loss.beta * ratios
        chosen_reward, rejected_reward = rewards.chunk(2)
        margin = chosen_reward - rejected_reward
        means.add("train/pair_accuracy", (margin > 0).float(), rows.included)
        means.add("train/score_margin", margin, rows.included)
        for name, reward, logprob in zip(("chosen", "rejected"), rewards.chunk(2), summed.chunk(2), strict=True):
            means.add(f"train/reward_{name}", reward, rows.included)
            means.add(f"train/logprob_{name}", logprob, rows.included)
        return self.loss(chosen, rejected)


def is_decided(marks: Tensor) -> Tensor:
    """Return (prompts,) bool, whether each prompt has a best and a worst response, from their (prompts, G) marks."""
    return (marks.amax(dim=1) > 0) & (marks.amin(dim=1) < 0)


class REBELModule(ResponsePairsModule):
    """Fits the difference of two responses' log-ratios to their difference in reward, by regression.

    Responses to a prompt are paired in the order in which they were sampled: first with second, third with fourth.
    Pairs with equal rewards count, too, because they keep the ratio of their probabilities. The reward contains the KL
    penalty of ``kl_reward``. See "REBEL: Reinforcement Learning via Regressing Relative Rewards", Gao et al. 2024,
    algorithm 1.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        loss: loss of a pair from its log-ratios and rewards.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(self, actor: str | ModelSource, loss: REBELLoss = REBELLoss(), **kwargs: Any) -> None:
        super().__init__(actor, GRPO(normalize_std=False), **kwargs)
        self.loss = loss

    def evaluate(self, received: StepRollout) -> Evaluation:
        """Evaluate a rollout with an even number of responses to every prompt; see :meth:`RLHFModule.evaluate`."""
        evaluation = super().evaluate(received)
        if self.group_size % 2:
            raise UsageError(f"REBEL pairs the responses to a prompt: group_size must be even, got {self.group_size}")
        return evaluation

    def select_training_rows(self, experience: Experience) -> ExperiencePairs:
        """Return neighbouring responses to each prompt as pairs. All ranks."""
        number = torch.arange(0, len(experience), 2)
        first = experience[number]
        second = experience[number + 1]
        included = first.mask.any(dim=1) & second.mask.any(dim=1)
        return ExperiencePairs(first, second, included)

    def losses_of_pairs(self, rows: ExperiencePairs, logprobs: Tensor, means: MeanAccumulator) -> Tensor:
        """Compute the (B,) squared error of each pair; see :meth:`ResponsePairsModule.losses_of_pairs`."""
        old_logprobs = torch.cat([rows.first.old_logprobs, rows.second.old_logprobs])
        first, second = (logprobs - old_logprobs).sum(dim=1).chunk(2)
        difference = rows.first.token_rewards.sum(dim=1) - rows.second.token_rewards.sum(dim=1)
        means.add("train/reward_difference", difference.abs(), rows.included)
        return self.loss(first, second, difference)
