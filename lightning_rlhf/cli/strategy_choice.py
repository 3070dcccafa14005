"""The strategy and the number of processes of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import registry  # noqa: F401 (registers the strategies' names with the Trainer)
from lightning_rlhf.strategies.names import our_name, unknown_strategy
from lightning_rlhf.strategies.roles import RoleStrategy


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
