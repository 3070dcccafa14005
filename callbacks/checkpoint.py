"""RunCheckpoint: the last checkpoint, and the best by a metric."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf.compat import save_due_checkpoint
from lightning_rlhf.strategies import manifest

log = logging.getLogger(__name__)


class RunCheckpoint(ModelCheckpoint):
    """Keeps ``checkpoints/last.ckpt`` every n steps; with a metric, ``checkpoints/best.ckpt`` instead.

    Under a role strategy these are folders, which any other role strategy on any number of processes resumes from.
    Steps are the Trainer's ``global_step``, one per training batch; the state after the run's last step is kept too.
    Resume with ``--ckpt_path last``, or from the best with its path.

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
        """Put checkpoints under the run's directory, and take away what a killed run left half written.

        Raises:
            ValueError: another RunCheckpoint writes the same file.
        """
        others = [c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c is not self]
        if any(other.filename == self.filename for other in others):
            raise ValueError(f"two RunCheckpoint callbacks would write {self.filename}.ckpt: keep one of them")
        self.dirpath = str(_directory(trainer))
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            folder = _directory(trainer) / f"{self.filename}.ckpt"
            if manifest.exists(folder):  # else nothing in it was ever finished, and whoever resumes from it is told
                manifest.remove_leftovers(folder)
            for draft in _directory(trainer).glob(f"{self.filename}.ckpt*.new"):  # of a checkpoint that is one file
                draft.unlink()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*exists and is not empty")  # of course, in a resumed run
            super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best so far."""
        super().load_state_dict(state_dict)
        self.current_score = state_dict["current_score"]

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # Lightning asks for the last checkpoint before setup() says where it is, and would look below the logger.
        last = _directory(trainer) / "last.ckpt"
        if manifest.exists(last) or last.is_file():
            return {str(last)}
        warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
        log.info("%s has no last.ckpt yet: training starts at the beginning.", _directory(trainer))
        return set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when due."""
        save_due_checkpoint(self, trainer)


def _directory(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "checkpoints"
