"""Mixture: one step with reinforcement learning, distillation and demonstrations, by the source of each prompt."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.advantages_by_source import AdvantagesBySource
from lightning_rlhf.extras.algorithms.distillation import Divergence, Teacher, TeacherModule
from lightning_rlhf.extras.algorithms.divergence import DistilledScores
from lightning_rlhf.functional.logprobs import ActorScores
from lightning_rlhf.functional.mismatch import means_over_ranks
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, TokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.types import Experience, Rollout


class SourceObjective(ABC):
    """Objective of the prompts of one source. Subclasses are frozen dataclasses."""

    weight: float
    aggregation: Aggregation

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise UsageError(f"weight of {type(self).__name__} must be at least 0, got {self.weight}")


@dataclass(frozen=True)
class RewardObjective(SourceObjective):
    """Reinforcement learning from the rewards of sampled responses.

    Args:
        advantages: how rewards become advantages, over the responses of this source.
        weight: weight of the loss, at least 0.
        aggregation: how the losses of the source's tokens become one loss.
    """

    advantages: AdvantageEstimator = field(default_factory=GRPO)
    weight: float = 1.0
    aggregation: Aggregation = field(default_factory=TokenMean)


@dataclass(frozen=True)
class TeacherObjective(SourceObjective):
    """Distillation of a teacher.

    Args:
        teacher: one of the teachers that :class:`~lightning_rlhf.extras.algorithms.distillation.DistillationModule`
            accepts.
        weight: weight of the loss, at least 0.
        aggregation: how the divergences of the source's tokens become one loss.
    """

    teacher: Teacher
    weight: float = 1.0
    aggregation: Aggregation = field(default_factory=TokenMean)


@dataclass(frozen=True)
class SupervisedObjective(SourceObjective):
    """Supervised learning of the responses in your data, read with ``given_responses`` of RolloutLoop.

    Args:
        weight: weight of the loss, at least 0.
        aggregation: how the losses of the source's tokens become one loss.
        loss: ``cross_entropy`` or ``dft``, as in :class:`~lightning_rlhf.SFTModule`.
    """

    weight: float = 1.0
    aggregation: Aggregation = field(default_factory=TokenMean)
    loss: Literal["cross_entropy", "dft"] = "cross_entropy"


class MixtureModule(TeacherModule):
    """Trains a policy with a separate objective for each source of prompts.

    For example, you can learn mathematics from rewards and chat from a teacher in one run. The loss of an update is the
    sum of the objectives' losses times their weights. Each is divided by its own count over the mini-batch and all
    ranks, so the gradient is the weighted sum of the gradients of separate runs. A source without rows in a mini-batch
    adds nothing to it.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        mixture: objective for each value of the column ``source`` or ``data_source``.
        divergence: divergence of all teacher objectives.
        kl_reward: KL to the reference subtracted from each token's reward, for the reward objectives.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`. Policy loss, reference, correction, KL,
            entropy bonus and ``target_kl`` apply to the reward objectives.
    """

    has_entropy_bonus = True

    def __init__(
        self,
        actor: str | ModelSource,
        mixture: dict[str, SourceObjective],
        divergence: Divergence = Divergence(),
        kl_reward: KLTerm = KLTerm(),
        **kwargs: Any,
    ) -> None:
        estimators = _estimators_of(mixture)
        if kl_reward.coef > 0 and not estimators:
            raise UsageError("kl_reward belongs to reward objectives, but the mixture has none: remove it")
        super().__init__(
            actor,
            reward_model=None,
            advantages=AdvantagesBySource(estimators),
            aggregation=TokenMean(),
            kl_reward=kl_reward,
            score_shaping=ScoreShaping(),
            **kwargs,
        )
        self.mixture = mixture
        self.needs_current_rollouts = bool(estimators)
        self.set_teachers(
            {name: each.teacher for name, each in mixture.items() if isinstance(each, TeacherObjective)}, divergence
        )

    # -- sources ----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Validate that each objective has the responses that it needs."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        loop = next((callback for callback in callbacks if hasattr(callback, "given_responses")), None)
        if loop is None:
            return
        for name, objective in self.mixture.items():
            sampled = 1.0 if loop.given_responses is None else loop.given_responses.sampled_fraction(name)
            if isinstance(objective, SupervisedObjective) and sampled > 0:
                raise UsageError(
                    f"the source {name!r} of the mixture learns from responses of the data, but they are sampled: set "
                    f"given_responses of RolloutLoop to {{on_policy: {{{name}: 0}}}}"
                )
            if isinstance(objective, RewardObjective) and sampled < 1:
                raise UsageError(
                    f"the source {name!r} of the mixture learns from the rewards of sampled responses, but "
                    f"given_responses of RolloutLoop has responses of the data: set its on_policy of {name} to 1"
                )

    def check_sources(self) -> None:
        """Raise for prompts whose source has no objective."""
        missing = [name for name in self.source_names if name not in self.mixture]
        if missing or not self.source_names:
            fault = f"no objective for the source {missing[0]!r}" if missing else "one objective for each source"
            raise UsageError(
                f"mixture has {fault}: the rows have {self.source_names[:8]} in the column source or data_source, the "
                f"objectives are for {sorted(self.mixture)}"
            )
        numbers = {name: number for number, name in enumerate(self.source_names)}
        self.advantages = AdvantagesBySource(_estimators_of(self.mixture), numbers)

    def rows_from(self, name: str, rollout: Rollout) -> Tensor:
        """Return (B,) bool, the rows of a source."""
        if rollout.source is None:
            raise UsageError(f"{type(self).__name__} has an objective for each source, but the rollout has no sources")
        if name not in self.source_names:
            return torch.zeros_like(rollout.included)
        return rollout.source == self.source_names.index(name)

    def rows_of_kind(self, kind: type[SourceObjective], rollout: Rollout) -> Tensor:
        """Return (B,) bool, the rows of the sources with one kind of objective."""
        of_kind = torch.zeros_like(rollout.included)
        for name, objective in self.mixture.items():
            if isinstance(objective, kind):
                of_kind |= self.rows_from(name, rollout)
        return of_kind

    def has_reward(self, rollout: Rollout, reward: Tensor) -> Tensor:
        """Return (B,) bool, the rows of other objectives, and those that have the reward of theirs."""
        has_reward = torch.ones_like(rollout.included)
        for name, estimator in _estimators_of(self.mixture).items():
            has_reward &= estimator.has_reward(reward, rollout.rewards) | ~self.rows_from(name, rollout)
        return has_reward

    def corrected_rows(self, rollout: Rollout) -> Tensor:
        """Return (B,) bool, the sampled rows of reward objectives: other objectives are defined for any text."""
        return rollout.sampled_rows & self.rows_of_kind(RewardObjective, rollout)

    def tokens_of(self, kind: type[SourceObjective], rows: Experience) -> Tensor:
        """Return (B, T) bool, the tokens in the losses of one kind of objective."""
        return rows.mask & self.rows_of_kind(kind, rows.rollout).unsqueeze(1)

    # -- the step ---------------------------------------------------------------------------------------------

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """Yield mini-batches with the factor of each row in the loss; see :meth:`RLHFModule.minibatches`."""
        for minibatch in super().minibatches(experience):
            yield replace(minibatch, scale=self._scale(minibatch))

    def _scale(self, minibatch: Experience) -> Tensor:
        """Return (B,) float64: the weight of each row's objective, divided by its count over all ranks. All ranks."""
        scale = torch.zeros(len(minibatch), dtype=torch.float64, device=minibatch.mask.device)
        for name, objective in self.mixture.items():
            rows = self.rows_from(name, minibatch.rollout)
            count = objective.aggregation.denominator(minibatch.mask & rows.unsqueeze(1), self.data_ranks)
            scale += rows * (objective.weight / count)
        return scale

    def denominator(self, minibatch: Experience) -> Tensor:
        """Return () 1: the factors of the rows contain the counts."""
        return torch.ones((), dtype=torch.float64, device=minibatch.mask.device)

    def token_weights(self, rows: Experience) -> Tensor:
        """Return (B, T) float64, the factor of each token's loss."""
        assert rows.scale is not None
        weights = torch.zeros(rows.mask.shape, dtype=torch.float64, device=rows.mask.device)
        for name, objective in self.mixture.items():
            weights += objective.aggregation.weights(rows.mask & self.rows_from(name, rows.rollout).unsqueeze(1))
        return weights * rows.scale.unsqueeze(1)

    @torch.no_grad()
    def with_selected_tokens(self, minibatch: Experience, seed: int) -> Experience:
        """Select among the tokens of the reward objectives; see :meth:`RLHFModule.with_selected_tokens`. All ranks."""
        rewarded = replace(minibatch, mask=self.tokens_of(RewardObjective, minibatch))
        return replace(super().with_selected_tokens(rewarded, seed), mask=minibatch.mask)

    def update_scores(self, rows: Experience) -> ActorScores:
        """Return the actor's scores, with the divergence of tokens that have a teacher, with gradient. All ranks."""
        if not self.teachers:
            return self.actor_scores("actor", rows.rollout)
        mask = self.tokens_of(TeacherObjective, rows)
        return self.compared(rows.rollout, mask, rows.teacher, self.token_weights(rows))

    def policy_objective(self, rows: Experience, scores: ActorScores, means: MeanAccumulator) -> Tensor:
        """Return the weighted losses of all objectives, summed over the tokens of some rows."""
        losses = torch.zeros_like(rows.mask, dtype=scores.logprobs.dtype)
        if isinstance(self.advantages, AdvantagesBySource) and self.advantages.estimators:
            rewarded = replace(rows, mask=self.tokens_of(RewardObjective, rows))
            losses = torch.where(rewarded.mask, self.policy_losses(rewarded, scores, means), losses)
        for name, objective in self.mixture.items():
            if isinstance(objective, SupervisedObjective):
                mask = rows.mask & self.rows_from(name, rows.rollout).unsqueeze(1)
                factor = scores.logprobs.detach().exp() if objective.loss == "dft" else 1.0
                losses = torch.where(mask, -scores.logprobs * factor, losses)
                means.add("loss/sft", -scores.logprobs, mask)
        loss = (losses.masked_fill(~rows.mask, 0) * self.token_weights(rows).to(losses.dtype)).sum()
        if isinstance(scores, DistilledScores):
            distilled = self.tokens_of(TeacherObjective, rows)
            means.add("loss/distillation", scores.divergence, distilled)
            losses, loss = torch.where(distilled, scores.divergence, losses), loss + scores.loss
        for name in self.mixture:
            mask = rows.mask & self.rows_from(name, rows.rollout).unsqueeze(1)
            means.add(f"mixture/{name}/loss", losses, mask)
            means.add(f"mixture/{name}/entropy", scores.entropy, mask)
        return loss

    def rollout_metrics(self, experience: Experience, roles: set[str]) -> dict[str, float]:
        """Return the metrics of a rollout, with rewards and lengths of each source. All ranks."""
        metrics = RLHFModule.rollout_metrics(self, experience, roles)
        rollout = experience.rollout
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for name, objective in self.mixture.items():
            rows = self.rows_from(name, rollout)
            values[f"mixture/{name}/fraction"] = (rows, torch.ones_like(rows))
            values[f"mixture/{name}/response_tokens"] = (rollout.sampled_lengths, rows)
            if isinstance(objective, RewardObjective):
                values[f"mixture/{name}/reward"] = (experience.reward, rows & experience.rewarded_rows)
        return metrics | means_over_ranks(values, self.data_ranks)


def _estimators_of(mixture: dict[str, SourceObjective]) -> dict[str, AdvantageEstimator]:
    """Return the estimator of each source with a reward objective.

    Raises:
        ValueError: the mixture is empty.
    """
    if not mixture:
        raise UsageError("mixture must have an objective for each source of the prompts, got an empty dictionary")
    return {name: each.advantages for name, each in mixture.items() if isinstance(each, RewardObjective)}
