"""Every use of what Lightning keeps to itself, in one place, so that an upgrade that breaks one breaks it here.

Checked against lightning 2.6.6; tests/test_compat.py says what changed when a name is gone.
"""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import do_nothing_closure
from torch.optim import Optimizer


def optimizer_at(module: LightningModule, index: int) -> Optimizer:
    """The module's optimizer number ``index``, without the wrapper that counts its steps."""
    return module.trainer.strategy.optimizers[index]


def step_optimizer(module: LightningModule, index: int) -> None:
    """Step one optimizer under the Trainer's precision and hooks, without moving ``global_step``; clear its gradients."""
    optimizer = optimizer_at(module, index)
    module.trainer.strategy.optimizer_step(optimizer, do_nothing_closure, model=module)
    optimizer.zero_grad()


def count_training_step(trainer: Trainer) -> None:
    """Move ``global_step`` by one: once per batch, however many optimizers stepped how often inside it.

    Lightning counts every step of every optimizer under manual optimization, so ``max_steps``, ``fast_dev_run`` and
    ``every_n_train_steps`` would count something nobody asked for.
    """
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def run_validation(trainer: Trainer) -> None:
    """One validation pass from inside ``on_train_start``, with its metrics logged and its hooks called."""
    first_iteration = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_iteration


def align_logger_step(trainer: Trainer) -> None:
    """Make the loggers' x-axis continue at ``global_step`` after a resume."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def validation_due(trainer: Trainer) -> bool:
    """Whether a validation follows the training batch that has just ended, or is running."""
    if trainer.validating:
        return True
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def save_due_checkpoint(checkpoint: ModelCheckpoint, trainer: Trainer) -> None:
    """What ``ModelCheckpoint`` does at the end of a training batch, without its advice for manual optimization."""
    if checkpoint._every_n_train_steps < 1 or trainer.global_step % checkpoint._every_n_train_steps:
        return
    if not checkpoint._should_skip_saving_checkpoint(trainer):
        candidates = checkpoint._monitor_candidates(trainer)
        checkpoint._save_topk_checkpoint(trainer, candidates)
        checkpoint._save_last_checkpoint(trainer, candidates)
