"""Online DPO: DPO on pairs of the policy's responses, ordered by reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import concatenate
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.modules.role_module import SummedLoss
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.base import approx_kl, log_ratio_of
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.objectives.preference_losses import DirectLoss, DPOLoss
from lightning_rlhf.objectives.preference_pairs import BestAgainstWorst
from lightning_rlhf.tensor_batch import TensorBatch
from lightning_rlhf.types import Experience, Rollout


@dataclass(frozen=True)
class ExperiencePairs(TensorBatch):
    """The best and the worst response to each prompt.

    Args:
        chosen: the best response to each prompt.
        rejected: the worst response to each prompt.
        decided: (B,) bool, False where all rewards are equal: the pair is left out.
    """

    chosen: Experience
    rejected: Experience
    decided: Tensor

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens that both take once padded to the longer one."""
        return 2 * torch.maximum(self.chosen.total_lengths, self.rejected.total_lengths)

    @property
    def mask(self) -> Tensor:
        """(B,) which pairs count."""
        return self.decided


class OnlineDPOModule(RLHFModule):
    """DPO on pairs of the policy's responses: the best and the worst response to each prompt by reward.

    Prompts whose responses all have the same reward are left out, and counted in ``train/tied_fraction``. Rewards come
    from reward functions, a reward model, or both; only their order matters.
    See "Direct Language Model Alignment from Online AI Feedback", Guo et al. 2024.

    ``minibatch_size`` counts responses as everywhere, so with a group_size of 8 a mini-batch of 64 is 8 pairs.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        loss: loss of a pair from its log-ratios.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    needs_ref = True

    def __init__(self, actor: str | ModelSource, loss: DirectLoss = DPOLoss(), **kwargs: Any) -> None:
        super().__init__(
            actor,
            advantages=BestAgainstWorst(),
            policy_loss=ClippedPolicyLoss(),
            aggregation=TokenMean(),
            correction=None,
            kl_reward=KLTerm(),
            kl_loss=KLTerm(),
            ent_coef=0.0,
            **kwargs,
        )
        self.loss = loss

    def setup(self, stage: str) -> None:
        """Raise for mini-batches that would split groups, or leave a rank without one."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for size in {getattr(callback, "group_size", 1) for callback in callbacks} - {1}:
            if self.minibatch_size % size or self.minibatch_size // size < self.data_ranks.size:
                raise ValueError(
                    f"minibatch_size {self.minibatch_size} must be a multiple of group_size {size} with a prompt for "
                    f"each of {self.data_ranks.size} ranks: use a multiple of {size * self.data_ranks.size}"
                )

    def evaluate(self, rollout: Rollout, greedy: Rollout | None = None) -> Experience:
        """Evaluate a rollout with the same number of responses to every prompt; see :meth:`RLHFModule.evaluate`."""
        sizes = rollout.group.unique(return_counts=True)[1]
        self.group_size = int(sizes[0])
        if self.group_size < 2 or bool((sizes != self.group_size).any()):
            raise ValueError(
                f"all prompts must have the same number (>= 2) of responses, got {sizes.unique().tolist()}"
            )
        return super().evaluate(rollout, greedy)

    def select_training_rows(self, experience: Experience) -> TensorBatch:
        """Return a pair of responses to each prompt. All ranks."""
        marks = experience.advantages.sum(dim=1).sign().view(-1, self.group_size)
        first = torch.arange(len(marks), device=marks.device) * self.group_size
        best = first + marks.argmax(dim=1)
        worst = first + marks.argmin(dim=1)
        decided = (marks.amax(dim=1) > 0) & (marks.amin(dim=1) < 0)
        self.evaluation_metrics["train/tied_fraction"] = float((~decided).float().mean())
        return ExperiencePairs(experience[best], experience[worst], decided)

    def losses(self) -> dict[str, SummedLoss]:
        """Return the loss of the actor."""
        return {"actor": self.pair_loss}

    def denominator(self, minibatch: ExperiencePairs) -> Tensor:
        """Return () the number of pairs of all ranks. All ranks."""
        return self.data_ranks.sum(minibatch.decided.sum())

    def pair_loss(self, rows: ExperiencePairs, means: MeanAccumulator) -> Tensor:
        """Compute the loss, summed over some pairs."""
        sides = (rows.chosen, rows.rejected)
        both = concatenate([side.rollout for side in sides])
        old, ref = (torch.cat([getattr(side, name) for side in sides]) for name in ("old_logprobs", "ref_logprobs"))
        logprobs = self.actor_scores("actor", both).logprobs
        mask, tokens = both.response_mask, both.response_mask.sum(dim=1).clamp(min=1)
        summed = logprobs.sum(dim=1)
        ratios = summed - ref.sum(dim=1)  # 0 where the mask is False, as the actor's
        losses = self.loss(*(ratios / tokens if self.loss.length_normalized else ratios).chunk(2))
        rewards, decided = self.loss.beta * ratios, rows.decided
        means.add("train/loss", losses, decided)
        means.add("train/pair_accuracy", (torch.sub(*rewards.chunk(2)) > 0).float(), decided)
        means.add("train/score_margin", torch.sub(*rewards.chunk(2)), decided)
        for name, reward, logprob in zip(("chosen", "rejected"), rewards.chunk(2), summed.chunk(2), strict=True):
            means.add(f"train/reward_{name}", reward, decided)
            means.add(f"train/logprob_{name}", logprob, decided)
        counted = mask & decided.repeat(2).unsqueeze(1)
        means.add_approx_kl(approx_kl(log_ratio_of(logprobs, old)), counted)
        return losses.masked_fill(~decided, 0).sum()
