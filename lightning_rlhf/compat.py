"""All uses of private names of Lightning, and one of torch.

Checked against lightning 2.6.6; tests/test_compat.py fails when a name is missing.
"""

import copy
import itertools
import traceback
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Optimizer


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the Trainer of a module, or None; ``LightningModule.trainer`` would raise without a Trainer."""
    return module._trainer


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a process group; torch creates the groups of a device mesh with its default timeout."""
    _set_pg_timeout(timeout, group)


def optimizer_at(module: LightningModule, index: int) -> Optimizer:
    """Return a module's optimizer by index, without Lightning's wrapper, which would count its steps."""
    return module.trainer.strategy.optimizers[index]


def step_optimizer(module: LightningModule, index: int) -> None:
    """Step one optimizer with the Trainer's precision and hooks and clear its gradients; keep ``global_step``."""
    optimizer = optimizer_at(module, index)
    module.trainer.strategy.optimizer_step(optimizer, do_nothing_closure, model=module)
    optimizer.zero_grad()


def count_training_step(trainer: Trainer) -> None:
    """Advance ``global_step`` by one per batch, independent of the number of optimizer steps in it.

    Under manual optimization, Lightning counts every step of every optimizer, also for ``max_steps``, ``fast_dev_run``
    and ``every_n_train_steps``. The loggers' x-axis is set to the same count: Lightning's is one less, and is not
    restored when a run resumes.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()
    loop._batches_that_stepped = trainer.global_step


def run_validation(trainer: Trainer) -> None:
    """Run a full validation inside ``on_train_start``, with hooks and logged metrics."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = trainer.global_step
    first_iteration = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    loop.val_loop.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_iteration


def validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the training batch that has just ended."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def training_ends(trainer: Trainer) -> bool:
    """Return whether the training batch that has just ended is the last one of the run."""
    loop = trainer.fit_loop
    last_batch = loop.epoch_loop._num_ready_batches_reached()
    epochs = loop.max_epochs
    last_epoch = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step or (last_batch and last_epoch)


def settle_progress(checkpoint: dict[str, Any], epoch_batches: int | float) -> None:
    """Set a checkpoint's loop counters to their values after the batch, regardless of the hook that saved it.

    Lightning infers its position from partly updated counters, sometimes wrongly: after a checkpoint at an epoch's last
    batch, later epochs have wrong numbers, and the next resume repeats data. Here a batch is either finished or not
    started, and an epoch is finished when its last batch is.

    Args:
        checkpoint: checkpoint with ``loops``, saved at the end of a training batch or in the validation after it;
            changed in place.
        epoch_batches: number of training batches of an epoch.
    """
    fit = checkpoint["loops"]["fit_loop"]
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
    for counts in (batches["total"], batches["current"]):
        counts["completed"] = counts["processed"]
    # Otherwise a resumed validation would skip as many batches as the previous one had.
    for counts in fit["epoch_loop.val_loop.batch_progress"].values():
        if isinstance(counts, dict):
            counts.update(dict.fromkeys(counts, 0))
    current = batches["current"]
    finished = batches["is_last_batch"] or current["ready"] >= epoch_batches or current["ready"] == 0
    for counts in (epochs["total"], epochs["current"]):  # a run that ends within an epoch has counted it as processed
        counts["processed"] = counts["completed"] = counts["started"] - (not finished)
    checkpoint["epoch"] = epochs["current"]["completed"]
    if finished:
        batches["is_last_batch"] = False
        current.update(dict.fromkeys(current, 0))
        fit["state_dict"].pop("combined_loader", None)  # the next epoch starts at its beginning


class _FinishingFitLoop(_FitLoop):
    """Fit loop that runs its start and end hooks also when a run resumes after its last step."""

    @property
    def skip(self) -> bool:
        """Whether to skip the loop; when resuming, only without training batches."""
        if self.is_resuming:
            return bool(self.max_batches == 0 or self.trainer.limit_train_batches == 0)
        return bool(super().skip)


def finish_when_resumed(trainer: Trainer) -> None:
    """Run start and end hooks also when a run resumes after its last step, because it was killed before its end.

    Lightning would skip ``on_train_start`` and ``on_train_end``, and so a validation that was due.
    """
    if type(trainer.fit_loop) is _FitLoop:
        trainer.fit_loop.__class__ = _FinishingFitLoop


def save_checkpoint_now(checkpoint: ModelCheckpoint, trainer: Trainer) -> bool:
    """Save as ``ModelCheckpoint`` does at the end of a training batch, without its warning about manual optimization.

    Returns:
        Whether a checkpoint was saved; False if this step was saved before.
    """
    if checkpoint._should_skip_saving_checkpoint(trainer):
        return False
    candidates = checkpoint._monitor_candidates(trainer)
    checkpoint._save_topk_checkpoint(trainer, candidates)
    checkpoint._save_last_checkpoint(trainer, candidates)
    return True


_TAKES_SNAPSHOT: ContextVar[bool] = ContextVar("takes snapshot", default=False)


def is_taking_snapshot() -> bool:
    """Return whether ``on_save_checkpoint`` was called by :func:`checkpoint_state`."""
    return _TAKES_SNAPSHOT.get()


def checkpoint_state(trainer: Trainer) -> dict[str, Any]:
    """Return a copy of the state that ``Trainer.save_checkpoint`` would write; role strategies exclude the models.

    It is written only if the run ends before the next step: a callback can leave out state that takes time to compute,
    and add it in ``complete_snapshot``.
    """
    token = _TAKES_SNAPSHOT.set(True)
    try:
        state = trainer._checkpoint_connector.dump_checkpoint(False)
    finally:
        _TAKES_SNAPSHOT.reset(token)
    for name in ("callbacks", "loops", "lr_schedulers"):  # they may contain dictionaries that callbacks change later
        state[name] = copy.deepcopy(state[name])
    return state


def disable_signal_handlers(trainer: Trainer) -> None:
    """Disable Lightning's handlers of SIGTERM and of SLURM's signal.

    The SIGTERM handler calls a collective at an arbitrary point of the program and ends the run with exit code 0; the
    handler of SLURM's signal saves in the middle of an update.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def set_global_step(trainer: Trainer, step: int) -> None:
    """Set ``global_step`` outside of a fit, where Lightning does not restore it from a checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    loop.manual_optimization.optim_step_progress.total.completed = step
    loop._batches_that_stepped = step


def replaces_samplers(trainer: Trainer) -> bool:
    """Return whether the Trainer replaces data loaders' samplers by distributed ones."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and connector.is_distributed)


def is_lightning_error(error: BaseException, package: str = "lightning.") -> bool:
    """Return whether an error is about invalid arguments of Lightning.

    Lightning raises built-in exceptions for most of these, so they are identified by the module that raised them.

    Args:
        error: exception.
        package: prefix of the module's name.
    """
    if not isinstance(error, MisconfigurationException | ValueError | RuntimeError | ImportError):
        return False
    return is_raised_in(error, package)


def is_raised_in(error: BaseException, package: str) -> bool:
    """Return whether a module raised an error whose name begins with ``package``, for example ``lightning.``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(package)


def follow_until_averaged(callback: Any, module: LightningModule) -> bool:
    """Copy a module's weights to Lightning's average of them if that has not begun; return whether it has not.

    Args:
        callback: a ``WeightAveraging``.
    """
    average = callback._average_model
    if average is None or int(average.n_averaged) > 0:
        return False
    averaged = itertools.chain(average.module.parameters(), average.module.buffers())
    for target, source in zip(averaged, itertools.chain(module.parameters(), module.buffers()), strict=True):
        target.data.copy_(source.data)
    return True
