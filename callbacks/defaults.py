"""Default callbacks of a run, and the order of all callbacks; the weights of averages that have not begun."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, WeightAveraging

from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.records.run_reader import RunMeter, RunPrinter, RunReader, RunWriter
from lightning_rlhf.callbacks.survival.checkpoint import RunCheckpoint
from lightning_rlhf.callbacks.survival.graceful_shutdown import GracefulShutdown
from lightning_rlhf.callbacks.survival.run_state import RunState
from lightning_rlhf.compat import follow_until_averaged
from lightning_rlhf.entry_points import offered

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


def complete(callbacks: Sequence[Callback]) -> list[Callback]:
    """Add missing default callbacks, and sort all.

    If you configure a callback of a default's class or of a subclass, it replaces the default. Your callbacks run in an
    order that works. Signals are handled first, and the clock starts before the rollout. Callbacks that measure come
    before those that write, and a checkpoint is saved after all other files of its step.

    If you configure no checkpoint, a RunCheckpoint with its defaults replaces Lightning's, which saves at the end of
    each epoch. If all your checkpoints save the best by a metric, a RunCheckpoint for the last one is added. With an
    average of weights, AverageStart becomes a default too. Extras offer more defaults, such as MetricsCSV.

    MetricsCSV, HealthChecks, ReportPage, RunCheckpoint, StepProgressBar and GracefulShutdown also work with any other
    ``LightningModule``. Callbacks that need rollouts or roles end with an error that says so.

    Args:
        callbacks: callbacks of the Trainer.
    """
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    saves_best_only = all(isinstance(callback, RunCheckpoint) and callback.monitor for callback in checkpoints)
    if checkpoints and (saves_best_only or all(map(_is_lightning_default, checkpoints))):
        callbacks = [*(callback for callback in callbacks if not _is_lightning_default(callback)), RunCheckpoint()]
    elif checkpoints and not any(map(_saves_last, checkpoints)):
        log.warning("ModelCheckpoint takes the place of RunCheckpoint: --ckpt_path last needs save_last: true of it")
    defaults = [GracefulShutdown, RunState]
    if any(isinstance(callback, WeightAveraging) for callback in callbacks):
        defaults.append(AverageStart)
    has_rollouts = any(isinstance(callback, RolloutLoop) for callback in callbacks)
    further = offered("default_callback")
    defaults += [kind for kind in further if has_rollouts or not getattr(kind, "needs_rollouts", False)]
    missing = [default() for default in defaults if not any(isinstance(callback, default) for callback in callbacks)]
    first = (AverageStart, GracefulShutdown, RunMeter, RunPrinter, RolloutLoop)
    order = (*first, Callback, RunWriter, RunState, RunReader, Checkpoint)

    def position(callback: Callback) -> int:
        kinds = (i for i, kind in enumerate(order) if kind is not Callback and isinstance(callback, kind))
        return next(kinds, order.index(Callback))

    return sorted([*callbacks, *missing], key=position)


def _saves_last(callback: Callback) -> bool:
    return isinstance(callback, RunCheckpoint) or bool(getattr(callback, "save_last", True))


def _is_lightning_default(callback: Callback) -> bool:
    """Return whether Lightning added a checkpoint callback, because none was configured."""
    is_plain = type(callback) is ModelCheckpoint and callback.dirpath is None and callback.filename is None
    return is_plain and callback.state_key == ModelCheckpoint().state_key
