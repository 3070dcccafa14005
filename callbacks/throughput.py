"""Throughput: seconds per step and per token, tokens per second, memory, and how much of the device was put to use."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.modules.role_module import RoleModule

from .clock import over_ranks
from .module_check import check_module

GIB = 2.0**30
# Dense bfloat16 TFLOP/s that the makers state, by a part of the device's name; the first that fits.
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0,
    "L40": 181.0, "L4": 121.0,
}  # fmt: skip


class Throughput(Callback):
    """Logs ``time/step_s``, from one batch's start to its end on the slowest rank, and ``perf/...`` over all ranks.

    Tokens are those of prompts and responses. Memory is the largest since the run began: of the device that needs most,
    and resident in the process that needs most, without an engine in a process of its own.

    ``perf/mfu_update`` is the share of the devices' peak that the update's arithmetic takes, after "PaLM", Chowdhery et
    al. 2022, appendix B: a role of N parameters and L layers of width d does 6 N n + 12 L d n^2 floating-point
    operations to learn once from a text of n tokens; their sum over roles, texts and passes is divided by
    ``time/update_s``, devices and peak. It is logged where the peak is known.

    Args:
        peak_tflops: of one device in the precision that is trained in, without sparsity, 10^12 operations per second.
            None looks up what a few devices do in bfloat16, and knows nothing of others or of other precisions.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops must be positive or null, got {peak_tflops}")
        self.peak_tflops = peak_tflops
        self._started = 0.0

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Validate the module."""
        check_module(self, pl_module, RoleModule)

    def on_train_batch_start(self, trainer: Trainer, pl_module: RoleModule, batch: Any, batch_idx: int) -> None:
        """Start the clock; this callback stands before RolloutLoop."""
        self._started = time.perf_counter()
        if isinstance(pl_module, RLHFModule):
            pl_module.step_seconds = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it. A module whose own ``training_step`` measures no parts has the figures of the whole step."""
        largest = {"time/step_s": time.perf_counter() - self._started, **memory(pl_module.device)}
        module = pl_module if isinstance(pl_module, RLHFModule) else None
        lengths: torch.Tensor = (module.last_rollout if module else batch).total_lengths  # type: ignore[union-attr]
        total = {"perf/tokens": float(lengths.sum()), "rows": float(len(lengths))}
        total["devices"] = trainer.world_size / pl_module.roles.data_ranks  # more than one where they split tensors
        peak = self.peak_tflops or known_peak(pl_module)
        parts = (module.step_seconds or {}) if module else {}
        if module:
            total["operations"] = operations_per_pass(module) if peak and parts else 0.0
        total = over_ranks(total, pl_module.roles.sum_over_ranks, pl_module.device)
        largest = over_ranks(largest | parts, pl_module.roles.max_over_ranks, pl_module.device)
        tokens, devices, seconds = total["perf/tokens"], total["devices"], largest["time/step_s"]
        found = {name: value for name, value in largest.items() if name not in parts}
        found |= {"perf/tokens": tokens, "perf/tokens_per_s": tokens / seconds}
        found["perf/tokens_per_s_per_device"] = tokens / seconds / devices
        if module:
            found |= {f"time/{name}_ms_per_token": 1000 * largest[name] / tokens for name in parts}
            if generated := float(trainer.callback_metrics.get("rollout/tokens_per_s", 0.0)):
                found["time/generate_ms_per_token"] = 1000 / generated
            if peak and parts:
                passes = module.actor_updates * module.minibatch_size / total["rows"]
                operations = total["operations"] * (passes if module.actor_learns else module.update_epochs)
                found["perf/mfu_update"] = operations / (largest["update"] * devices * peak * 1e12)
        pl_module.log_step("throughput", found, bar=("perf/tokens_per_s",))


def memory(device: torch.device) -> dict[str, float]:
    """Most memory in use since the process began, GiB."""
    found = {"perf/cpu_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if device.type == "cuda":
        found["perf/memory_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        found["perf/memory_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return found


def known_peak(module: RoleModule) -> float | None:
    """TFLOP/s of a device in bfloat16, if it is known and that is what is trained in."""
    if module.device.type != "cuda" or not str(module.trainer.precision).startswith("bf16"):
        return None
    name = torch.cuda.get_device_name(module.device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def operations_per_pass(module: RLHFModule) -> float:
    """Floating-point operations it takes to learn once from each of this rank's last responses."""
    assert module.last_rollout is not None
    lengths = module.last_rollout.total_lengths.double()
    parameters, operations = module.parameter_counts(), 0.0
    for role in module.trained_roles if module.actor_learns else module.trained_roles[1:]:
        config = getattr(module, role).lm.config.get_text_config()
        squares = 12 * config.num_hidden_layers * config.hidden_size * (lengths**2).sum().item()
        operations += 6 * parameters[role] * lengths.sum().item() + squares
    return operations
