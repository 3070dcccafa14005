"""Throughput: seconds per step and tokens per second."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.modules.base import RLHFModule


class Throughput(Callback):
    """Logs ``time/step_s``, from one batch's start to its end, and ``perf/tokens_per_s``, prompts and responses."""

    def __init__(self) -> None:
        self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock; this callback stands before RolloutLoop."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it."""
        seconds = time.perf_counter() - self._started
        learnt_from = pl_module.experience if isinstance(pl_module, RLHFModule) else batch
        tokens = float(learnt_from.total_lengths.sum())
        pl_module.log("time/step_s", seconds, batch_size=1)
        pl_module.log("perf/tokens_per_s", tokens / seconds, prog_bar=True, batch_size=1)
