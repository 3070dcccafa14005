"""Settings of the Trainer that cannot be used here, with the setting to use instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from lightning_rlhf.directions import direction_of, is_own
from lightning_rlhf.expected_errors import UsageError

log = logging.getLogger(__name__)
_SETTINGS = {
    "gradient_clip_val": "gradients are clipped for each model: set model.init_args.max_grad_norm",
    "gradient_clip_algorithm": "gradients are clipped by their norm: set model.init_args.max_grad_norm",
    "barebones": "it disables the logging and the checkpoints of a run: remove it",
}
_CALLBACKS = {
    LearningRateFinder: "set model.init_args.optimizer.init_args.lr",
    BatchSizeFinder: "set model.init_args.micro_batch_tokens, the tokens of one forward pass",
    GradientAccumulationScheduler: "set model.init_args.micro_batch_tokens, the tokens of one forward pass",
    StochasticWeightAveraging: "use lightning.pytorch.callbacks.EMAWeightAveraging",
}


def check_trainer(settings: Mapping[str, Any]) -> None:
    """Validate the ``trainer`` section of a configuration before the Trainer is created.

    Raises:
        UsageError: a setting belongs to automatic optimization, which is not used here, or would train nothing.
    """
    for name, instead in _SETTINGS.items():
        if settings.get(name):
            raise UsageError(f"trainer.{name} is {settings[name]!r}, but {instead}")
    accumulated = settings.get("accumulate_grad_batches")
    if accumulated not in (None, 1):
        raise UsageError(
            f"trainer.accumulate_grad_batches is {accumulated}, but gradients are accumulated over micro-batches of "
            f"model.init_args.micro_batch_tokens tokens: lower that to save memory, and raise "
            f"data.init_args.batch_size for a larger batch"
        )
    if settings.get("limit_train_batches") == 0:
        raise UsageError("trainer.limit_train_batches is 0, so nothing would be trained: remove it, or set at least 1")
    if settings.get("max_steps") == 0:
        raise UsageError("trainer.max_steps is 0, so nothing would be trained: set at least 1, or -1 for no limit")
    if settings.get("val_check_interval") == 0:
        raise UsageError(
            "trainer.val_check_interval is 0: set at least 1 step, or limit_val_batches: 0 for no validation"
        )
    callbacks = settings.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                raise UsageError(
                    f"{kind.__name__} needs automatic optimization of one model, but runs here optimize several "
                    f"models manually: {instead}"
                )
        _check_direction(callback)


def _check_direction(callback: Any) -> None:
    """Raise for a callback of Lightning that would keep the worst, or end a run that improves: their default is min."""
    if not isinstance(callback, EarlyStopping | ModelCheckpoint) or callback.monitor is None:
        return
    known = direction_of(callback.monitor)
    if known in (None, callback.mode):
        return
    monitors = f"{type(callback).__name__} monitors {callback.monitor} with mode: {callback.mode}"
    if is_own(callback.monitor):
        raise UsageError(f"{monitors}, but the best value of this metric is its {known}imum: set mode: {known}")
    log.warning("%s; if its best value is its %simum, set mode: %s", monitors, known, known)
