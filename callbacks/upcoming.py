"""Prompts of the next training steps."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import Trainer

from lightning_rlhf.data.resumable import ResumableLoader
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.types import PromptBatch


def upcoming_batches(trainer: Trainer, count: int) -> Iterator[tuple[int, PromptBatch]]:
    """Yield (step, prompts of this rank) of the next training batches, fewer where the run ends before.

    Args:
        trainer: trainer at the start of a training batch.
        count: number of batches after this one.

    Raises:
        ValueError: the training data loader is not a ResumableLoader, so later batches are unknown.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, ResumableLoader):
        raise UsageError(
            f"max_staleness requests the prompts of later steps, which needs the data loader of PromptDataModule, got "
            f"{type(loader).__name__}: set max_staleness to 0, or do not override train_dataloader"
        )
    size = int(trainer.num_training_batches)
    for ahead in range(1, count + 1):
        epochs, batch = divmod(trainer.fit_loop.batch_idx + ahead, size)
        epoch, step = trainer.current_epoch + epochs, trainer.global_step + ahead
        if 0 <= trainer.max_steps <= step or (trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch):
            return
        yield step, loader.batch_at(epoch, batch)
