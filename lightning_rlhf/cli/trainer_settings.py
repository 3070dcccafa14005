"""Settings of the Trainer that cannot be used here, with the setting to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import registry  # noqa: F401 (registers the strategies' names with the Trainer)
from lightning_rlhf.strategies.names import our_name, unknown_strategy
from lightning_rlhf.strategies.roles import RoleStrategy

_SETTINGS = {
    "gradient_clip_val": "gradients are clipped for each model: set model.init_args.max_grad_norm",
    "gradient_clip_algorithm": "gradients are clipped by their norm: set model.init_args.max_grad_norm",
    "barebones": "it disables the logging and the checkpoints of a run: remove it",
}
_CALLBACKS = {
    LearningRateFinder: "set model.init_args.actor_optimizer.init_args.lr",
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
    callbacks = settings.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                raise UsageError(
                    f"{kind.__name__} needs automatic optimization of one model, but runs here optimize several "
                    f"models manually: {instead}"
                )


def find_strategy(name: str, processes: int) -> str:
    """Return the role strategy for a name in a configuration.

    Args:
        name: name such as ``auto``, ``ddp`` or ``rlhf_fsdp``.
        processes: number of processes over all nodes.

    Raises:
        UsageError: no role strategy has this name.
    """
    known = [ours for ours in StrategyRegistry if issubclass(StrategyRegistry[ours]["strategy"], RoleStrategy)]
    strategy = our_name(name, processes)
    if strategy in known:
        return strategy
    raise UsageError(unknown_strategy(name, "" if name in StrategyRegistry else strategy, known))


def process_count(accelerator: Any, devices: Any, nodes: int) -> int:
    """Return the number of processes for arguments of the Trainer, one per device.

    Args:
        accelerator: the Trainer's ``accelerator``.
        devices: the Trainer's ``devices``; ``auto`` and -1 are all GPUs, or one process on CPUs.
        nodes: number of machines.
    """
    if devices in (None, "auto", -1, "-1"):
        gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
        return max(gpus, 1) * nodes
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    if isinstance(devices, str) and not devices.strip().isdigit():
        return nodes  # Lightning reports the error
    return (len(devices) if isinstance(devices, list) else int(devices)) * nodes
