"""PairModule: the update on preference pairs, and the metrics of held-out pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.functional.diagnostics import calibration_bins, calibration_error, wilson_interval
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.types import PreferenceBatch


class PairModule(RoleModule):
    """Trains its first role on pairs of texts; every pair has the same weight.

    Metrics of held-out pairs are the share that is ordered correctly with its confidence interval, and the expected
    calibration error.
    """

    reads: type | None = PreferenceBatch

    @abstractmethod
    def row_scores(self, rows: Any) -> Sequence[Tensor]:
        """Return the scores of some rows under the models, (B,) each. All ranks."""

    @abstractmethod
    def losses(self, rows: Any, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """Return (B,) the loss of each row from the result of :meth:`row_scores`; adds metrics under the prefix."""

    @abstractmethod
    def differences(self, scores: Sequence[Tensor]) -> Tensor:
        """Return (B,) the model's log-odds that the preferred text of each pair is the better one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update the role on one batch."""
        self.finish_step(self.learn(batch), bar=("train/loss", "train/pair_accuracy"))

    def learn(self, batch: Any) -> dict[str, float]:
        """Update the first trained role on one batch; metrics. All ranks."""
        role = self.trained_roles[0]
        rows = self.data_ranks.sum(torch.tensor(len(batch), device=self.device))
        result = self.update(role, batch, self.summed_loss, rows)
        return {**result.means.means(self.data_ranks), f"grad_norm/{role}": float(result.grad_norm)}

    def summed_loss(self, rows: Any, means: MeanAccumulator) -> Tensor:
        """Compute the loss, summed over some rows."""
        return self.losses(rows, self.row_scores(rows), means, "train").sum()

    def on_validation_epoch_start(self) -> None:
        """Reset the counts."""
        self._held_out, self._pairs = MeanAccumulator(), 0
        self._calibration = torch.zeros(3, 10, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy of held-out pairs, the mean over pairs."""
        means, scores = MeanAccumulator(), self.map_micro_batches(self.row_scores, batch)
        self.losses(batch, scores, means, "val")
        self.log_validation(means, torch.tensor(len(batch), device=self.device), bar="val/pair_accuracy")
        self._held_out.merge(means)
        self._pairs += len(batch)
        self._calibration += calibration_bins(self.differences(scores))

    def on_validation_epoch_end(self) -> None:
        """Log the number of held-out pairs, the 95 % interval of their accuracy, and the calibration error."""
        accuracy = self._held_out.means(self.data_ranks)["val/pair_accuracy"]
        pairs = float(self.data_ranks.sum(torch.tensor(float(self._pairs), device=self.device)))
        low, high = wilson_interval(round(accuracy * pairs), pairs)
        error = calibration_error(self.data_ranks.sum(self._calibration))
        metrics = {
            "pairs": pairs,
            "pair_accuracy_low": low,
            "pair_accuracy_high": high,
            "pair_calibration_error": error,
        }
        for name, value in metrics.items():
            self.log(f"val/{name}", value, batch_size=1)
