"""RunCheckpoint: the last checkpoints, and the best by a metric."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf.compat import checkpoint_state, save_checkpoint_now, training_ends
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints import manifest, remote
from lightning_rlhf.strategies.checkpoints.background import SaveOptions
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints

log = logging.getLogger(__name__)
_NO_CHECKPOINT = "%s has no last.ckpt yet: training starts at the beginning."


class RunCheckpoint(ModelCheckpoint):
    """Keeps ``checkpoints/last.ckpt`` every n steps; with a metric, ``checkpoints/best.ckpt`` instead.

    Under a role strategy these are folders, which any other role strategy on any number of processes resumes from.
    Steps are the Trainer's ``global_step``, one per training batch; the state after the run's last step is kept too.
    Resume with ``--ckpt_path last``, or from the best with its path.

    Args:
        every_n_steps: between two saves of the last checkpoint, at least 1.
        best: metric whose best validation is kept, for example ``val/sampled``; None keeps the last state.
        mode: whether the largest or the smallest value is best.
        every_n_minutes: save also whenever so many minutes have passed since the last save, positive; None does not.
        keep_last: versions of the last checkpoint to keep, at least 1; an earlier one is resumed from by its path,
            ``checkpoints/last.ckpt/v000006``.
        copy_to: URL of a folder that fsspec can write, such as ``s3://bucket/run``, to which each finished checkpoint
            is copied; ``--ckpt_path last`` takes the copy where the run directory has no checkpoint. None: no copy.
        background: write a copy of the trained roles and their optimizers in host memory while training continues;
            False makes training wait instead of the copy, as does a signal that ends the run.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        best: str | None = None,
        mode: Literal["min", "max"] = "max",
        every_n_minutes: float | None = None,
        keep_last: int = 1,
        copy_to: str | None = None,
        background: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise ValueError(f"every_n_minutes must be positive or null, got {every_n_minutes}")
        if best is not None and (every_n_minutes is not None or keep_last != 1):
            raise ValueError(
                "every_n_minutes and keep_last are for the last checkpoint, and this RunCheckpoint has best"
            )
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
        self.every_n_steps, self.every_n_minutes, self.keep_last = every_n_steps, every_n_minutes, keep_last
        self.copy_to, self.background = copy_to.rstrip("/") if copy_to else None, background
        self._own_steps: set[int] = set()  # that this run has saved, or was resumed from
        self._saved_step: int | None = None  # of the newest checkpoint that is a single file
        self._state: dict[str, Any] | None = None  # of the last finished step, while nothing has changed since
        self._saved_at = 0.0
        self._copy_failed: OSError | None = None

    @property
    def path(self) -> Path:
        """Folder of the checkpoint."""
        return Path(str(self.dirpath)) / f"{self.filename}.ckpt"

    @property
    def _url(self) -> str:
        return f"{self.copy_to}/{self.filename}.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put checkpoints under the run's directory, and remove incomplete files of a killed run.

        Raises:
            ValueError: another RunCheckpoint writes the same file, or the strategy's checkpoints are single files.
        """
        others = [c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c is not self]
        if any(other.filename == self.filename for other in others):
            raise ValueError(f"two RunCheckpoint callbacks would write {self.filename}.ckpt: keep one of them")
        self.dirpath = str(_directory(trainer))
        self._state, self._saved_step, self._copy_failed = None, None, None
        self._own_steps.clear()
        if isinstance(trainer.strategy, ReshardableCheckpoints):
            above, published = 0, None
            if self.copy_to:
                remote.check_url(self.copy_to)
                above, published = ranks.on_first_rank(lambda: remote.newest(self._url)), self._copy
            options = SaveOptions(self.keep_last, self.background, published, above)
            trainer.strategy.save_options[self.path] = options
        elif self.keep_last > 1 or self.copy_to:
            raise ValueError(
                f"keep_last and copy_to need checkpoints that are folders, and {type(trainer.strategy).__name__} "
                f"writes single files: take a strategy whose name begins with rlhf_"
            )
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            manifest.remove_leftovers(self.path)
            for draft in _directory(trainer).glob(f"{self.filename}.ckpt*.new"):  # of a checkpoint that is one file
                draft.unlink()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*exists and is not empty")  # of course, in a resumed run
            super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best so far; a run directory that was moved is where the run is now."""

        def here(path: str) -> str:
            return str(Path(str(self.dirpath)) / Path(path).name) if path else path

        moved = {name: here(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **moved, "best_k_models": best, "dirpath": self.dirpath})
        self.current_score = state_dict["current_score"]

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # Lightning asks for the last checkpoint before setup() sets its path, and would look below the logger.
        if self.monitor is not None:
            return set()
        last = _directory(trainer) / "last.ckpt"
        if not manifest.never_finished(last):
            return {str(last)}
        warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
        log.info(_NO_CHECKPOINT, _directory(trainer))
        return set()

    # -- saving ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count minutes."""
        super().on_train_start(trainer, pl_module)
        self._saved_at = time.monotonic()
        if trainer.ckpt_path is None:
            refuse_earlier_copies(trainer)
        elif not remote.is_url(trainer.ckpt_path) and Path(trainer.ckpt_path) == self.path:
            self._own_steps.add(trainer.global_step)
            self._saved_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Clear the state of the last step before an update changes it; this callback runs last."""
        self._state = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when due; remember the state of this step, for an end that comes before the next update."""
        if self.monitor is not None or trainer.fast_dev_run:
            return
        self._finish(trainer, wait=False)
        if self._due(trainer):
            if _ends_now(trainer):
                self._save_in_foreground(trainer)
            self._save_now(trainer)
        if trainer.world_size == 1:
            self._state = checkpoint_state(trainer)

    def _save_now(self, trainer: Trainer) -> None:
        if save_checkpoint_now(self, trainer):
            self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
            self._own_steps.add(trainer.global_step)

    def _due(self, trainer: Trainer) -> bool:
        if trainer.global_step % self.every_n_steps == 0 or _ends_now(trainer) or training_ends(trainer):
            return True
        if self.every_n_minutes is None:
            return False
        minutes = self.every_n_minutes
        return ranks.on_first_rank(lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    @property
    def saved_step(self) -> int | None:
        """Step of the newest finished checkpoint of this run; None before there is one."""
        newest = self._saved_step if self.path.is_file() else manifest.step_of(self.path)
        return newest if newest in self._own_steps else None

    @property
    def between_steps(self) -> bool:
        """Whether nothing of the state after the last finished step has changed since."""
        return self._state is not None

    def save_between_steps(self, trainer: Trainer) -> None:
        """Finish a save in the background; save the state after the last finished step where none has changed it.

        In a single process, or on all ranks.

        Raises:
            OSError, ValueError, FloatingPointError: it could not be saved.
        """
        self._finish(trainer)
        if self._state is None or self.saved_step == trainer.global_step:
            return
        self._save_in_foreground(trainer)
        trainer.strategy.save_checkpoint(self._state, self.path)
        self._finish(trainer)
        self._saved_step = trainer.global_step
        self._own_steps.add(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if the validation after it ended the run; wait for running saves.

        Raises:
            OSError, ValueError: it could not be written, or not be copied.
        """
        super().on_train_end(trainer, pl_module)
        if self.monitor is None and not trainer.fast_dev_run and trainer.global_step not in {0, *self._own_steps}:
            self._save_now(trainer)
        self._finish(trainer)
        if self._copy_failed is not None:
            raise self._copy_failed

    def _finish(self, trainer: Trainer, wait: bool = True) -> None:
        if isinstance(trainer.strategy, ReshardableCheckpoints):
            trainer.strategy.finish_saving(wait)

    def _save_in_foreground(self, trainer: Trainer) -> None:
        """Write the next checkpoints without a copy in host memory: nothing is trained after them."""
        if isinstance(trainer.strategy, ReshardableCheckpoints):
            options = trainer.strategy.save_options
            options[self.path] = replace(options[self.path], background=False)

    def _copy(self, version: Path) -> None:
        try:
            remote.upload(version, self._url)
        except OSError as error:
            self._copy_failed = error
            log.warning("%s could not be copied to %s: %s. The next save copies again.", version, self._url, error)
        else:
            self._copy_failed = None


def checkpoint_to_resume(trainer: Trainer) -> str | None:
    """Return the path, or the URL of the copy, of the last checkpoint of a run; None without a finished save.

    Raises:
        ValueError: there are other checkpoints, and no last one.
    """
    folder = _directory(trainer)
    callback = next(
        (c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c.monitor is None), None
    )
    if callback is None and not any(isinstance(c, RunCheckpoint) for c in trainer.checkpoint_callbacks):
        return "last"  # Lightning's own callbacks know where theirs are
    if not manifest.never_finished(folder / "last.ckpt"):
        return str(folder / "last.ckpt")
    if callback is not None and callback.copy_to:
        remote.check_url(callback.copy_to)
        if remote.exists(url := f"{callback.copy_to}/last.ckpt"):
            return url
    others = sorted(path for path in folder.glob("*.ckpt") if not manifest.never_finished(path))
    if others:
        raise ValueError(
            f"{folder} has {others[0].name} and no last.ckpt: resume with --ckpt_path {others[0]}, or choose another "
            f"trainer.default_root_dir to start at the beginning"
        )
    log.info(_NO_CHECKPOINT, folder)
    return None


def refuse_earlier_copies(trainer: Trainer) -> None:
    """Refuse a run from the beginning whose saves would replace the copy of an earlier run. All ranks.

    Raises:
        ValueError: there is such a copy.
    """

    def look() -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RunCheckpoint) and callback.copy_to and remote.exists(callback._url):
                raise ValueError(
                    f"{callback._url} holds a checkpoint of an earlier run, which this run would replace: resume with "
                    f"--ckpt_path last, or give RunCheckpoint another copy_to"
                )

    if not trainer.fast_dev_run:
        ranks.on_first_rank(look)


def _ends_now(trainer: Trainer) -> bool:
    """Return whether a callback ends the run after this step."""
    return any(getattr(callback, "ends_now", False) for callback in trainer.callbacks)


def _directory(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "checkpoints"
