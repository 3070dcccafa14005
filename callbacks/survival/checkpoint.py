"""RunCheckpoint: saves the last checkpoints, or the best by a metric."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_rlhf.callbacks.records.run_files import read_metrics
from lightning_rlhf.compat import checkpoint_state, save_checkpoint_now, training_ends
from lightning_rlhf.directions import direction_of, is_own
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_at_least, check_range
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.background import SaveOptions
from lightning_rlhf.strategies.checkpoints.io import is_url, url_copies
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints

log = logging.getLogger(__name__)
_MINUTES = 10.0
_STATE_BYTES = 3  # bytes of a checkpoint per byte of trained weights: they and the two moments of Adam
_NO_CHECKPOINT = "%s has no last.ckpt yet: training starts from the beginning."


class RunCheckpoint(ModelCheckpoint):
    """Saves ``checkpoints/last.ckpt`` every n steps, or ``checkpoints/best.ckpt`` if you name a metric.

    If you configure none that saves the last checkpoint, you get one with the defaults. Add another with ``best`` to
    keep the best model beside it.

    The last step is always saved. Steps are the Trainer's ``global_step``, one per training batch. With a role
    strategy, checkpoints are folders, and any role strategy on any number of processes can resume from them. Resume
    with ``--ckpt_path last``, or with the path of the best checkpoint. If there is neither a last checkpoint nor a
    copy, ``last`` starts from the beginning. If an earlier run never finished a save, its directory is renamed then.
    You get an error if the checkpoint lacks its manifest, or if there are only other checkpoints, such as the best.

    A version of a checkpoint becomes the current one only when it is complete and synced to disk. If a save is
    interrupted, the next run or save removes its files. Tied weights are written once. If a strategy computes in
    bfloat16 and keeps float32 weights in the optimizer, you get the float32 weights. DeepSpeed's Adam can resume from
    AdamW's state. Its state on NVMe (``offload_optimizer.device: nvme``) cannot be saved, so the run ends with an
    error. A run with Lightning's ``WeightAveraging`` cannot be resumed under a role strategy.

    Nothing is pickled. Each file's size and SHA-256 are checked before it is loaded. Weights that are not finite are
    never written: the run ends and names the tensor.

    Args:
        every_n_steps: steps between two saves of the last checkpoint, at least 1.
        best: metric that decides which validation is best, such as ``val/fraction_correct_greedy``. Its checkpoint is
            saved. None saves the last one.
        mode: whether the largest or the smallest value is best. None follows the metric: smallest for losses, errors
            and KL, largest for rewards and accuracies. For any other metric you must set it.
        every_n_minutes: longest time between two saves of the last checkpoint, minutes, positive. None sets no limit.
            If a save is due by time alone and the disk has no room, it is left out and logged.
        keep_last: versions of the last checkpoint to keep, at least 1. You resume from an earlier one with its path,
            ``checkpoints/last.ckpt/v000006``.
        copy_to: URL of a folder that fsspec can write, such as ``s3://bucket/run``. Each finished checkpoint is copied
            there. ``--ckpt_path last`` uses the copy if the run directory has no checkpoint. None makes no copy. If
            a copy fails, you get a warning. If the copy of the last checkpoint fails, the run ends with an error.
        background: whether to copy trained roles and optimizers to host memory and write them while training continues.
            With False, training waits while they are written without a copy, as after a signal that ends the run.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        best: str | None = None,
        mode: Literal["min", "max"] | None = None,
        every_n_minutes: float | None = _MINUTES,
        keep_last: int = 1,
        copy_to: str | None = None,
        background: bool = True,
    ) -> None:
        check_at_least(1, every_n_steps=every_n_steps, keep_last=keep_last)
        check_range("every_n_minutes", every_n_minutes, "positive or null")
        if best is not None and (every_n_minutes not in (None, _MINUTES) or keep_last != 1):
            raise UsageError("every_n_minutes and keep_last apply to the last checkpoint: remove them, or best")
        super().__init__(
            filename="best" if best else "last",
            monitor=best,
            mode=_mode_of(best, mode),
            save_top_k=1,
            every_n_train_steps=None if best else every_n_steps,
            every_n_epochs=1 if best else None,
            save_on_train_epoch_end=False,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.keep_last = keep_last
        self.copy_to = copy_to.rstrip("/") if copy_to else None
        self.background = background
        self._own_steps: set[int] = set()  # steps that this run has saved, and the one it was resumed from
        self._saved_step: int | None = None  # step of the newest checkpoint that is a single file
        self._state: dict[str, Any] | None = None  # state after the last step, until the next update begins
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
        """Set the run's folder of checkpoints, and remove incomplete files of a killed run.

        Raises:
            ValueError: another RunCheckpoint writes the same file, or the strategy's checkpoints are single files.
        """
        others = [c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c is not self]
        if any(other.filename == self.filename for other in others):
            raise UsageError(f"two RunCheckpoint callbacks would write {self.filename}.ckpt: keep one of them")
        self.dirpath = str(_directory(trainer))
        self._state = None
        self._saved_step = None
        self._copy_failed = None
        self._own_steps.clear()
        if isinstance(trainer.strategy, ReshardableCheckpoints):
            options = SaveOptions(self.keep_last, self.background)
            if self.copy_to:
                url_copies().check_url(self.copy_to)
                newest = ranks.on_first_rank(lambda: url_copies().newest(self._url))
                options = SaveOptions(self.keep_last, self.background, self._copy, newest)
            trainer.strategy.save_options[self.path] = options
        elif self.keep_last > 1 or self.copy_to:
            raise UsageError(
                f"keep_last and copy_to need checkpoints that are folders; {type(trainer.strategy).__name__} writes "
                f"single files: use a strategy whose name begins with rlhf_"
            )
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            manifest.remove_leftovers(self.path)
            for draft in _directory(trainer).glob(f"{self.filename}.ckpt*.new"):  # drafts of single-file checkpoints
                draft.unlink()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*exists and is not empty")  # in every resumed run
            super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best so far, with paths in the current run directory, which may have been moved."""

        def moved(path: str) -> str:
            return str(Path(str(self.dirpath)) / Path(path).name) if path else path

        paths = {
            name: moved(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        best = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": best, "dirpath": self.dirpath})
        self.current_score = state_dict["current_score"]

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        # Lightning calls this before setup() has set the path, and would search the logger's folder.
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
        """Start to count minutes; raise if the copy of an earlier run would be replaced."""
        super().on_train_start(trainer, pl_module)
        self._saved_at = time.monotonic()
        if trainer.ckpt_path is None:
            check_copies(trainer)
        elif not is_url(trainer.ckpt_path) and Path(trainer.ckpt_path) == self.path:
            self._own_steps.add(trainer.global_step)
            self._saved_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discard the state of the last step, which the step will change; this callback runs last.

        While rewards are still computed, a failure of theirs must not lose it: it is kept until the first update.
        """
        if not getattr(pl_module, "waits_for_rewards", False):
            self._state = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Discard the state of the last step, whose weights the update changes."""
        self._state = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when due; store the state of this step, in case the run ends before the next update."""
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
            self._saved_step = trainer.global_step
            self._saved_at = time.monotonic()
            self._own_steps.add(trainer.global_step)

    def _due(self, trainer: Trainer) -> bool:
        if trainer.global_step % self.every_n_steps == 0 or _ends_now(trainer) or training_ends(trainer):
            return True
        if (minutes := self.every_n_minutes) is None:
            return False
        return ranks.on_first_rank(lambda: self._late(trainer, 60 * minutes))

    def _late(self, trainer: Trainer, seconds: float) -> bool:
        """Return whether the last save was long ago and the disk has room for another one."""
        if time.monotonic() - self._saved_at < seconds:
            return False
        trained = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
        sizes = (getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size() for parameter in trained)
        needed, free = _STATE_BYTES * sum(sizes), shutil.disk_usage(trainer.default_root_dir).free
        if free < needed:
            self._saved_at = time.monotonic()
            log.warning(
                "No checkpoint is written %.0f minutes after the last one: it needs about %.1f GB, and %s has %.1f GB "
                "left. The next one is that of a step, or %.0f minutes later: free some space until then.",
                *(seconds / 60, needed / 1e9, trainer.default_root_dir, free / 1e9, seconds / 60),
            )
        return free >= needed

    @property
    def saved_step(self) -> int | None:
        """Step of the newest finished checkpoint of this run; None without one."""
        newest = self._saved_step if self.path.is_file() else manifest.step_of(self.path)
        return newest if newest in self._own_steps else None

    @property
    def between_steps(self) -> bool:
        """Whether the state has not changed since the last finished step."""
        return self._state is not None

    def save_between_steps(self, trainer: Trainer) -> None:
        """Wait for a background save; save the last finished step if the state has not changed since. All ranks.

        Raises:
            OSError, ValueError, FloatingPointError: the state could not be saved.
        """
        self._finish(trainer)
        if self._state is None or self.saved_step == trainer.global_step:
            return
        self._save_in_foreground(trainer)
        for callback in trainer.callbacks:
            if complete := getattr(callback, "complete_snapshot", None):
                complete(self._state)
        trainer.strategy.save_checkpoint(self._state, self.path)
        self._finish(trainer)
        self._saved_step = trainer.global_step
        self._own_steps.add(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if the validation after it ended the run; wait for running saves.

        Raises:
            OSError, ValueError: a checkpoint could not be written or copied.
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
        """Write the next checkpoints without a copy in host memory, because training has ended."""
        if isinstance(trainer.strategy, ReshardableCheckpoints):
            options = trainer.strategy.save_options
            options[self.path] = replace(options[self.path], background=False)

    def _copy(self, version: Path) -> None:
        try:
            url_copies().upload(version, self._url)
        except OSError as error:
            self._copy_failed = error
            log.warning("%s could not be copied to %s: %s. The next save copies again.", version, self._url, error)
        else:
            self._copy_failed = None


def _mode_of(best: str | None, mode: Literal["min", "max"] | None) -> Literal["min", "max"]:
    """Return the mode of the best checkpoint.

    Raises:
        UsageError: the mode contradicts the metric, or the metric has no known direction.
    """
    if best is None:
        return "max"
    known = direction_of(best)
    if mode is None and known is None:
        raise UsageError(f"best: {best} needs a mode, because its direction is not known: set mode to min or max")
    if mode is not None and known not in (None, mode) and is_own(best):
        raise UsageError(f"best: {best} with mode: {mode} would keep the worst checkpoint: remove mode")
    return mode or known or "max"


def last_checkpoint(trainer: Trainer) -> RunCheckpoint | None:
    """Return the callback that saves the last checkpoint, if there is one."""
    callbacks = (c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c.monitor is None)
    return next(callbacks, None)


def checkpoint_to_resume(trainer: Trainer, may_start: bool = True) -> str | None:
    """Return the path, or the URL of the copy, of the last checkpoint of a run; None without a finished save.

    Args:
        may_start: whether training starts from the beginning without one, which is logged.

    Raises:
        ValueError: there are other checkpoints, but no last one, or no callback saves it.
    """
    folder = _directory(trainer)
    callback = last_checkpoint(trainer)
    if callback is None and not any(isinstance(c, RunCheckpoint) for c in trainer.checkpoint_callbacks):
        if not any(getattr(callback, "save_last", None) for callback in trainer.checkpoint_callbacks):
            raise UsageError(
                "--ckpt_path last needs a callback that saves the last checkpoint: add "
                "lightning_rlhf.callbacks.RunCheckpoint, set save_last: true of ModelCheckpoint, or set the path of a "
                "checkpoint"
            )
        return "last"  # found by Lightning's own callback
    last = folder / "last.ckpt"
    if not (manifest.never_finished(last) or manifest.is_empty(last)):
        return str(last)
    if callback is not None and callback.copy_to:
        url_copies().check_url(callback.copy_to)
        if url_copies().exists(url := f"{callback.copy_to}/last.ckpt"):
            return url
    others = sorted(path for path in folder.glob("*.ckpt") if not manifest.never_finished(path) and path != last)
    if others:
        raise UsageError(
            f"{folder} has {others[0].name} but no last.ckpt: resume with --ckpt_path {others[0]}, or choose another "
            f"trainer.default_root_dir to start a new run"
        )
    if manifest.is_empty(last):
        return str(last)  # reading it raises an error; without one, a new run would replace the earlier one
    rows = read_metrics(folder.parent / "metrics.csv")
    if may_start and rows:
        log.info(
            "%s has no last.ckpt, although the earlier run has metrics up to step %s: its steps are lost. Training "
            "starts from the beginning, and the directory of the earlier run gets another name.",
            *(folder, rows[-1]["step"]),
        )
    elif may_start:
        log.info(_NO_CHECKPOINT, folder)
    return None


def check_copies(trainer: Trainer) -> None:
    """Validate that a new run would not replace the copied checkpoints of an earlier run. All ranks.

    Raises:
        ValueError: ``copy_to`` has a checkpoint of an earlier run.
    """

    def look() -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RunCheckpoint) and callback.copy_to and url_copies().exists(callback._url):
                raise UsageError(
                    f"{callback._url} is a checkpoint of an earlier run, which this run would replace: resume with "
                    f"--ckpt_path last, or set another copy_to of RunCheckpoint"
                )

    if not trainer.fast_dev_run:
        ranks.on_first_rank(look)


def _ends_now(trainer: Trainer) -> bool:
    """Return whether a callback ends the run after this step."""
    return any(getattr(callback, "ends_now", False) for callback in trainer.callbacks)


def _directory(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "checkpoints"
