"""Reward modelling: training a scalar model on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rlhf.batching.sequences import concat_texts
from lightning_rlhf.models.loading import ModelSource, as_source
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.pairs import PairModule
from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from lightning_rlhf.types import PreferenceBatch, SequenceBatch


class RewardModule(PairModule):
    """Trains a reward model: a scalar model that scores the preferred text of each pair higher.

    ``val/pair_calibration_error`` tells you how far sigmoid(score difference) is from a probability. If the sigmoid
    is 0.8 for many pairs, for example, 80 % of these pairs should be ordered correctly. The error refers to the
    unscaled scores, because a :class:`~lightning_rlhf.callbacks.PolicyCheck` scales them only at the end.

    Args:
        reward_model: initial model: directory, hub id or ``FromConfig``. A language model gets a new head.
        loss: loss of a pair from its scores.
        optimizer: factory that makes the optimizer from the parameters.
        lr_scheduler: factory of its scheduler, stepped once per batch. None keeps the rate constant.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.role_module.RoleModule`.
    """

    trained_roles = ("reward_model",)

    def __init__(
        self,
        reward_model: str | ModelSource,
        loss: PairwiseLoss = PairwiseLoss(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sources = {"reward_model": as_source(reward_model)}
        self.loss = loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def row_scores(self, rows: PreferenceBatch) -> Sequence[Tensor]:
        """Return (B,) scores of the preferred texts and of the others, from one forward pass."""
        return self.scores_of(concat_texts([rows.chosen, rows.rejected])).chunk(2)

    def scores_of(self, texts: SequenceBatch) -> Tensor:
        """Return (B,) scores of the last token of each text. All ranks."""
        packing = self.layout.pack(texts, texts.input_ids.shape[1])
        ends = (texts.lengths - 1).unsqueeze(1)
        images = self.layout.images_of(texts)
        scores: Tensor = self.role_strategy.role("reward_model")(texts.input_ids, ends, packing, images)
        return scores.squeeze(1)

    def losses(self, rows: PreferenceBatch, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """Return (B,) the loss of each pair, nats."""
        chosen, rejected = scores
        losses = self.loss(chosen, rejected, rows.margin)
        means.add(f"{prefix}/loss", losses)
        means.add(f"{prefix}/pair_accuracy", (chosen > rejected).float())
        means.add(f"{prefix}/score_margin", chosen - rejected)
        return losses

    def log_odds(self, scores: Sequence[Tensor]) -> Tensor:
        """Return (B,) score differences."""
        return scores[0] - scores[1]

    def build_role(self, name: str) -> nn.Module:
        """Build a scalar model."""
        return self.sources[name].scalar()

    def optimizer_of(self, name: str) -> tuple[Any, Any]:
        """Return the optimizer and scheduler factories."""
        return self.optimizer, self.lr_scheduler
