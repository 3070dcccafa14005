"""All uses of private names of Lightning, and one of torch, in one file: an upgrade that breaks one breaks it here.

Checked against lightning 2.6.6; tests/test_compat.py fails and names the change when a name is gone.
"""

import copy
import traceback
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
    """Return the Trainer that a module is attached to, or None; Lightning's own property raises."""
    return module._trainer


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the collectives of a device mesh's group, which torch creates with its default."""
    _set_pg_timeout(timeout, group)


def optimizer_at(module: LightningModule, index: int) -> Optimizer:
    """Return the module's optimizer number ``index``, without the wrapper that counts its steps."""
    return module.trainer.strategy.optimizers[index]


def step_optimizer(module: LightningModule, index: int) -> None:
    """Step one optimizer under the Trainer's precision and hooks and clear its gradients; ``global_step`` stays."""
    optimizer = optimizer_at(module, index)
    module.trainer.strategy.optimizer_step(optimizer, do_nothing_closure, model=module)
    optimizer.zero_grad()


def count_training_step(trainer: Trainer) -> None:
    """Advance ``global_step`` by one per batch, independent of the number of optimizer steps in it.

    Lightning counts every step of every optimizer under manual optimization, and ``max_steps``, ``fast_dev_run`` and
    ``every_n_train_steps`` would count those. The loggers' x-axis is set to the same count: Lightning's is one behind,
    and is lost at a resume.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()
    loop._batches_that_stepped = trainer.global_step


def run_validation(trainer: Trainer) -> None:
    """Run one whole validation pass from inside ``on_train_start``, with logged metrics and hooks."""
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
    """Set a checkpoint's loop counters to their values between two batches, wherever in a batch it was saved.

    Lightning infers its position from partly counted batches and epochs, and in some of ten cases miscounts: after a
    checkpoint at an epoch's last batch, all later epochs have wrong numbers, and the next resume repeats data. Here
    every batch is either finished or not started, and an epoch whose last batch is finished is finished.

    Args:
        checkpoint: checkpoint with ``loops``, saved at the end of a training batch or in the validation after it;
            changed in place.
        epoch_batches: number of training batches of an epoch.
    """
    fit = checkpoint["loops"]["fit_loop"]
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
    for counts in (batches["total"], batches["current"]):
        counts["completed"] = counts["processed"]
    # or a resumed validation would skip as many batches as the one before it had
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
    """A fit loop that still starts and ends when resumed after its last step, so that the remaining hooks run."""

    @property
    def skip(self) -> bool:
        """Whether there is no training batch."""
        if self.is_resuming:
            return bool(self.max_batches == 0 or self.trainer.limit_train_batches == 0)
        return bool(super().skip)


def finish_when_resumed(trainer: Trainer) -> None:
    """Let a resumed run that was killed between its last step and its end run the remaining hooks.

    Lightning would skip ``on_train_start`` and ``on_train_end``, and with them a validation that was due.
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


def checkpoint_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state that ``Trainer.save_checkpoint`` would write now; under a role strategy without the models."""
    state = trainer._checkpoint_connector.dump_checkpoint(False)  # False: more than the weights
    for name in ("callbacks", "loops", "lr_schedulers"):  # some are dictionaries that the callbacks change
        state[name] = copy.deepcopy(state[name])
    return state


def disable_signal_handlers(trainer: Trainer) -> None:
    """Keep Lightning from handling SIGTERM and SLURM's signal.

    Its handler of SIGTERM joins a collective at an arbitrary point of the program, and ends the run with exit code 0;
    the one of SLURM's signal saves in the middle of an update.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def set_global_step(trainer: Trainer, step: int) -> None:
    """Set ``global_step`` outside of a fit, where Lightning leaves it at 0 even after it loaded a checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    loop.manual_optimization.optim_step_progress.total.completed = step
    loop._batches_that_stepped = step


def replaces_samplers(trainer: Trainer) -> bool:
    """Return whether the Trainer replaces the sampler of each data loader to divide the data among processes."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and connector.is_distributed)


def is_lightning_error(error: BaseException, package: str = "lightning.") -> bool:
    """Return whether Lightning rejected its arguments.

    Lightning raises built-in exceptions for most such errors, so the module that raised them has to identify them.

    Args:
        error: exception.
        package: beginning of the name of the module that raised it.
    """
    if not isinstance(error, MisconfigurationException | ValueError | RuntimeError | ImportError):
        return False
    return is_raised_in(error, package)


def is_raised_in(error: BaseException, package: str) -> bool:
    """Return whether a module of a package raised an error; the name ends with a dot."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(package)
