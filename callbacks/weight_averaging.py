"""Weights of Lightning's averages before their first update."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from lightning_rlhf.compat import follow_until_averaged

log = logging.getLogger(__name__)


class AverageStart(Callback):
    """Gives each average of weights those of the module until it is updated for the first time.

    An average that starts later has the weights of the start of the run, which Lightning would validate, save and
    export. Precedes the averages in the list of callbacks.
    """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the weights of the module while nothing is averaged."""
        self._follow(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the weights of the module while nothing is averaged."""
        self._follow(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights of the module if nothing was averaged, and log that."""
        for name in self._follow(trainer, pl_module):
            log.warning("%s had not begun when the run ended: the results have the weights of the last step", name)

    def _follow(self, trainer: Any, pl_module: LightningModule) -> list[str]:
        """Return the class names of the averages that have not begun."""
        averages = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        return [type(average).__name__ for average in averages if follow_until_averaged(average, pl_module)]
