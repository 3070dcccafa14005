"""RunCheckpoint: the last checkpoint, and the best by a metric."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf.compat import save_due_checkpoint


class RunCheckpoint(ModelCheckpoint):
    """Keeps ``checkpoints/last.ckpt`` every n steps; with a metric, ``checkpoints/best.ckpt`` instead.

    Steps are the Trainer's ``global_step``, one per training batch. Resume with ``--ckpt_path last``.

    Args:
        every_n_steps: between two saves of the last checkpoint, at least 1.
        best: metric whose best validation is kept, for example ``val/sampled``; None keeps the last state.
        mode: whether the largest or the smallest value is best.
    """

    def __init__(self, every_n_steps: int = 10, best: str | None = None, mode: Literal["min", "max"] = "max") -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__(
            filename="best" if best else "last",
            monitor=best,
            mode=mode,
            save_top_k=1,
            every_n_train_steps=None if best else every_n_steps,
            every_n_epochs=1 if best else None,
            save_on_train_epoch_end=False,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put checkpoints under the run's directory."""
        self.dirpath = f"{trainer.default_root_dir}/checkpoints"
        super().setup(trainer, pl_module, stage)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when due."""
        save_due_checkpoint(self, trainer)
