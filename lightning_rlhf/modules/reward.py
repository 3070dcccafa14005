"""Reward modelling: learn from pairs which text people prefer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_rlhf.functional.diagnostics import wilson_interval
from lightning_rlhf.models.loading import ModelSource, as_source
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.objectives.preference_losses import PairwiseLoss
from lightning_rlhf.types import PreferenceBatch, SequenceBatch


class RewardModule(RoleModule):
    """A scalar model trained so that the preferred text of each pair scores higher.

    Args:
        reward_model: the model to start from: directory, hub id or ``FromConfig``; a language model gets a new head.
        loss: from the scores of a pair to its loss.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes its scheduler, stepped once per batch; None keeps the rate.
        micro_batch_tokens: most padded tokens in one forward pass.
        max_grad_norm: gradients are clipped to this global norm; None leaves them.
    """

    trained_roles = ("reward_model",)

    def __init__(
        self,
        reward_model: str | ModelSource,
        loss: PairwiseLoss = PairwiseLoss(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        micro_batch_tokens: int = 16384,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__(micro_batch_tokens, max_grad_norm)
        self.sources = {"reward_model": as_source(reward_model)}
        self.loss, self.optimizer, self.lr_scheduler = loss, optimizer, lr_scheduler

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """One update on one batch of pairs."""
        sums = Sums()
        pairs = self.roles.sum_over_ranks(torch.tensor(len(batch), device=self.device))
        norm = self.update("reward_model", batch, self.pair_loss, pairs, sums)
        metrics = {**self.reduced(sums), "grad_norm/reward_model": float(norm)}
        self.finish_step(metrics, bar=("train/loss", "train/pair_accuracy"))

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        self._held_out, self._pairs = Sums(), 0

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Loss and accuracy of held-out pairs, each pair counting the same."""
        sums = Sums()
        with torch.no_grad():
            self.pair_loss(batch, sums, prefix="val")
        self.log_validation(sums, torch.tensor(len(batch), device=self.device), bar="val/pair_accuracy")
        self._held_out.merge(sums)
        self._pairs += len(batch)

    def on_validation_epoch_end(self) -> None:
        """How sure the accuracy is: number of held-out pairs over all ranks, and the 95 % interval."""
        accuracy = self.reduced(self._held_out)["val/pair_accuracy"]
        pairs = float(self.roles.sum_over_ranks(torch.tensor(float(self._pairs), device=self.device)))
        low, high = wilson_interval(round(accuracy * pairs), pairs)
        for name, value in (("pairs", pairs), ("pair_accuracy_low", low), ("pair_accuracy_high", high)):
            self.log(f"val/{name}", value, batch_size=1)

    def pair_loss(self, rows: PreferenceBatch, sums: Sums, prefix: str = "train") -> Tensor:
        """Loss summed over some pairs, both texts in one forward pass."""
        width = int(torch.maximum(rows.chosen.lengths, rows.rejected.lengths).max())
        ids = torch.cat([_widened(rows.chosen, width), _widened(rows.rejected, width)])
        last = torch.cat([rows.chosen.lengths, rows.rejected.lengths]) - 1
        scores = self.roles.role("reward_model")(ids, last.unsqueeze(1)).squeeze(1)
        chosen, rejected = scores.chunk(2)
        losses = self.loss(chosen, rejected, rows.margin)
        sums.add(f"{prefix}/loss", losses)
        sums.add(f"{prefix}/pair_accuracy", (chosen > rejected).float())
        sums.add(f"{prefix}/score_margin", chosen - rejected)
        return losses.sum()

    def build_role(self, name: str) -> nn.Module:
        """The scalar model."""
        return self.sources[name].scalar()

    def optimizer_of(self, name: str) -> tuple[Any, Any]:
        """The only one."""
        return self.optimizer, self.lr_scheduler


def _widened(texts: SequenceBatch, width: int) -> Tensor:
    ids = texts.input_ids[:, :width]
    return pad(ids, (0, width - ids.shape[1]))
