"""Throughput: logs seconds per step and token, tokens per second, memory, and model FLOPs utilization."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.callbacks.records.run_reader import RunMeter
from lightning_rlhf.modules.rlhf import RLHFModule, TrainedStep
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rollout.clock import max_over_ranks, sum_over_ranks

GIB = 2.0**30
# Dense bfloat16 TFLOP/s with sums in float32, from the data sheets, by a part of the device's name; the first match
# counts. GeForce cards are half as fast with sums in float32 as with those in float16.
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0, "H20": 148.0,
    "A100": 312.0, "A800": 312.0, "A40": 149.7, "A10G": 70.0, "A10": 125.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "RTX 6000 Ada": 364.2, "A6000": 154.8, "A5000": 111.1, "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2,
    "RTX 4080 SUPER": 104.4, "RTX 4080": 97.5, "RTX 3090 Ti": 80.0, "RTX 3090": 71.0,
}  # fmt: skip


class Throughput(RunMeter):
    """Logs ``time/step_s``, the duration of a step on the slowest rank, and ``perf/...`` over all ranks.

    Tokens count prompts and responses. Memory is the peak since the start of the run, on the device and in the process
    with the highest peak. An engine in another process is not included.

    ``perf/mfu_update`` tells you how well the update uses your devices, as a fraction of their peak. It follows "PaLM",
    Chowdhery et al. 2022, appendix B. One pass of a role with N parameters and L layers of width d over a text of n
    tokens takes 6 N n + 12 L d n^2 floating-point operations. The sum over roles, texts and passes is divided by
    ``time/update_s``, the number of devices and their peak. It is logged if the peak is known.

    Args:
        peak_tflops: peak of one device in the precision of training, without sparsity, 10^12 operations per second.
            None uses the bfloat16 peak of common devices. For other devices and precisions there is no default.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        check_range("peak_tflops", peak_tflops, "positive or null")
        self.peak_tflops = peak_tflops
        self._started = 0.0

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Validate the module."""
        check_module(self, pl_module, RoleModule)

    def on_train_batch_start(self, trainer: Trainer, pl_module: RoleModule, batch: Any, batch_idx: int) -> None:
        """Start the clock; this callback runs before RolloutLoop."""
        self._started = time.perf_counter()
        if isinstance(pl_module, RLHFModule):
            pl_module.last_step = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log time, tokens and memory; metrics of the parts of a step only if ``training_step`` measures them."""
        ranks, device = pl_module.data_ranks, pl_module.device
        largest = {"time/step_s": time.perf_counter() - self._started, **memory(device)}
        if isinstance(pl_module, RLHFModule):
            assert pl_module.last_rollout is not None
            batch = pl_module.last_rollout
        counts = {"tokens": float(batch.total_lengths.sum()), "devices": trainer.world_size / ranks.size}
        total = sum_over_ranks(counts, ranks, device)
        tokens = total["tokens"]
        metrics = max_over_ranks(largest, ranks, device)
        metrics["perf/tokens"] = tokens
        metrics["perf/tokens_per_s"] = tokens / metrics["time/step_s"]
        metrics["perf/tokens_per_s_per_device"] = metrics["perf/tokens_per_s"] / total["devices"]
        if isinstance(pl_module, RLHFModule):
            metrics |= self._part_metrics(trainer, pl_module, tokens, total["devices"])
        pl_module.log_step("throughput", metrics, bar=("perf/tokens_per_s",))

    def _part_metrics(self, trainer: Trainer, module: RLHFModule, tokens: float, devices: float) -> dict[str, float]:
        """Compute time per token of generation, evaluation and update, and the fraction of the devices' peak."""
        metrics = dict[str, float]()
        loops = [callback for callback in trainer.callbacks if hasattr(callback, "tokens_per_s")]
        if loops and loops[0].tokens_per_s:
            metrics["time/generate_ms_per_token"] = 1000 / loops[0].tokens_per_s
        step = module.last_step
        if step is None:
            return metrics
        ranks, device = module.data_ranks, module.device
        seconds = max_over_ranks(step.times, ranks, device)
        metrics |= {f"time/{part}_ms_per_token": 1000 * value / tokens for part, value in seconds.items()}
        if peak := self.peak_tflops or known_peak(module):
            counts = {"operations": operations_per_pass(module, step), "rows": float(len(step.experience))}
            total = sum_over_ranks(counts, ranks, device)
            passes = step.actor_updates * module.minibatch_size / total["rows"]
            operations = total["operations"] * (passes if "actor" in step.roles else module.update_epochs)
            metrics["perf/mfu_update"] = operations / (seconds["update"] * devices * peak * 1e12)
        return metrics


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of the process, GiB."""
    metrics = {"perf/cpu_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if device.type == "cuda":
        metrics["perf/memory_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        metrics["perf/memory_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return metrics


def known_peak(module: RoleModule) -> float | None:
    """Return the TFLOP/s of a device in bfloat16; None for unknown devices, slices in MIG mode and other precisions."""
    if module.device.type != "cuda" or not str(module.trainer.precision).startswith("bf16"):
        return None
    name = torch.cuda.get_device_name(module.device)
    return None if " MIG " in name else next((peak for part, peak in PEAKS.items() if part in name), None)


def operations_per_pass(module: RLHFModule, step: TrainedStep) -> float:
    """Return the floating-point operations of one pass over this rank's responses of a step."""
    lengths = step.experience.total_lengths.double()
    parameters = module.parameter_counts()
    operations = 0.0
    for role in step.roles:
        config = getattr(module, role).lm.config.get_text_config()
        squares = 12 * config.num_hidden_layers * config.hidden_size * (lengths**2).sum().item()
        operations += 6 * parameters[role] * lengths.sum().item() + squares
    return operations
