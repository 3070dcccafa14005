"""PairModule: the update on preference pairs, and the metrics of held-out pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.metrics import PairAccuracy, PairCalibrationError, over
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.types import PreferenceBatch


class PairModule(RoleModule):
    """Trains its first role on pairs of texts; every pair has the same weight.

    Metrics of held-out pairs are the fraction that is ordered correctly with its confidence interval, and the expected
    calibration error.
    """

    reads: type | None = PreferenceBatch
    has_pairs = True
    allows_dropout = True

    @abstractmethod
    def row_scores(self, rows: Any) -> Sequence[Tensor]:
        """Return (B,) tensors of which :meth:`losses` computes the losses of rows, such as log-ratios. All ranks."""

    @abstractmethod
    def losses(self, rows: Any, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """Return (B,) the loss of each row from the result of :meth:`row_scores`; adds metrics under the prefix."""

    @abstractmethod
    def log_odds(self, scores: Sequence[Tensor]) -> Tensor:
        """Return (B,) the model's log-odds that the preferred text of each pair is the better one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update the role on one batch."""
        self.finish_step(self.learn(batch), bar=("train/loss", "train/pair_accuracy"))

    def learn(self, batch: Any) -> dict[str, float]:
        """Update the first trained role on one batch, and return its metrics. All ranks."""
        role = self.trained_roles[0]
        total = self.data_ranks.sum(torch.tensor(len(batch), device=self.device))
        result = self.update(role, batch, self.summed_loss, total)
        return {**result.means.means(self.data_ranks), f"grad_norm/{role}": float(result.grad_norm)}

    def summed_loss(self, rows: Any, means: MeanAccumulator) -> Tensor:
        """Compute the loss, summed over some rows."""
        return self.losses(rows, self.row_scores(rows), means, "train").sum()

    def on_validation_epoch_start(self) -> None:
        """Begin the metrics of all held-out pairs."""
        options = over(self.data_ranks)
        # A tuple, because strategies would shard metrics that are submodules.
        self._held_out_pairs = (
            PairAccuracy(**options).to(self.device),
            PairCalibrationError(**options).to(self.device),
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy of held-out pairs, the mean over pairs."""
        means = MeanAccumulator()
        scores = self.micro_batches.map(self.row_scores, batch)
        self.losses(batch, scores, means, "val")
        self.log_validation(means, torch.tensor(len(batch), device=self.device), bar="val/pair_accuracy")
        for metric in self._held_out_pairs:
            metric.update(self.log_odds(scores))

    def on_validation_epoch_end(self) -> None:
        """Log the number of held-out pairs, the 95 % interval of their accuracy, and the calibration error."""
        accuracy, calibration = self._held_out_pairs
        counted = accuracy.compute()
        metrics = {
            "pairs": counted["pairs"],
            "pair_accuracy_low": counted["low"],
            "pair_accuracy_high": counted["high"],
            "pair_calibration_error": calibration.compute(),
        }
        for name, value in metrics.items():
            self.log(f"val/{name}", value, batch_size=1)
