"""StepProgressBar: Lightning's rich bar, counting steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StepProgressBar(RichProgressBar):
    """The rich progress bar with the metrics of the module, without the number of the logger's version."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics of the progress bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        epochs = self.trainer.max_epochs or 1
        return "Steps" if epochs <= 1 else f"Epoch {current_epoch + 1} of {epochs}, steps"
