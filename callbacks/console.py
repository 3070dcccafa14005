"""Console: a description of the run, and one line per step where no progress bar can be drawn."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.rewards.function import RewardFunction

from .module_check import check_module
from .rollout_loop import RolloutLoop

log = logging.getLogger(__name__)
_FIRST_STEPS = 3
_MOST_KL_PER_TOKEN = 0.1  # nats per response token; the quickstart, whose policy changes much, stays below 0.08
_HEARTBEAT_SECONDS = 60.0
_LINE_METRICS = (
    "train/loss", "train/pair_accuracy", "reward/mean", "reward/std", "kl/ref", "loss/policy", "loss/value",
    "policy/entropy", "perf/tokens_per_s",
)  # fmt: skip


class Console(Callback):
    """Prints a description of the run, then a line every n steps and per validation if the output is not a terminal.

    Args:
        every_n_steps: between two lines, at least 1.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._ended: threading.Event | None = None  # of the step under way
        self._far_from_ref = False  # whether the run was warned of its KL
        self._flat: Counter[tuple[str, str]] = Counter()  # steps at which a reward gave all responses this value

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Validate the module."""
        check_module(self, pl_module, RoleModule)

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Print the description of the run."""
        self._flat.clear()
        self._far_from_ref = False
        if trainer.is_global_zero:
            print("\n".join(self.first_screen(trainer, pl_module)), flush=True)

    def first_screen(self, trainer: Trainer, module: RoleModule) -> list[str]:
        """Return lines on models, data, batch arithmetic, engine and device."""
        data = trainer.datamodule
        sizes = [f"{name} {_count(n)}" for name, n in module.parameter_counts().items()]
        threads = f"{module.device.type}, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name() if module.device.type == "cuda" else threads
        lines = [f"{type(module).__name__}: {', '.join(sizes)} parameters on {device}"]
        if trainer.world_size > 1:
            nodes = f"{trainer.num_nodes} node{'s' if trainer.num_nodes > 1 else ''}"
            lines.append(f"{type(trainer.strategy).__name__}: {trainer.world_size} processes on {nodes}")
        lines += [str(report) for report in data.reports.values()]
        steps = trainer.max_steps if trainer.max_steps > 0 else trainer.num_training_batches * (trainer.max_epochs or 1)
        if isinstance(module, RLHFModule) and any(isinstance(callback, RolloutLoop) for callback in trainer.callbacks):
            loop = next(callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop))
            prompts = loop.prompts_per_step(data)
            responses = prompts * loop.group_size
            minibatches = responses // module.minibatch_size
            of_up_to = f" of up to {data.batch_size}" if data.batch_size > prompts else ""
            lines.append(
                f"one step: {prompts}{of_up_to} prompts x {loop.group_size} = {responses} responses, learnt from in "
                f"{module.update_epochs} x {minibatches} mini-batches of {module.minibatch_size} "
                f"= {minibatches * module.update_epochs} updates; {steps} steps"
            )
            lines.append(f"rollouts: {loop.engine_description}, at most {loop.max_response_tokens} tokens")
            lines += trust_in_reward_model(module)
        else:
            lines.append(f"one step: {data.batch_size} rows, one update; {steps} steps")
        if unused := unused_validation(trainer, steps):
            lines.append(unused)
        lines.append(f"run directory: {trainer.default_root_dir}")
        return lines

    def on_train_batch_start(self, trainer: Trainer, pl_module: RoleModule, batch: Any, batch_idx: int) -> None:
        """Begin to print a line for every minute that the step takes."""
        if trainer.is_global_zero and not _draws_a_bar(trainer):
            self._stop_heartbeat()
            self._ended = threading.Event()
            beat = threading.Thread(target=_heartbeat, args=(trainer.global_step + 1, self._ended), daemon=True)
            beat.start()

    def on_exception(self, trainer: Trainer, pl_module: RoleModule, exception: BaseException) -> None:
        """Print no more."""
        self._stop_heartbeat()

    def _stop_heartbeat(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print one line; warn of a reward that is the same for all responses, and of a large KL to the reference."""
        self._stop_heartbeat()
        loops = [callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)]
        rewards = [reward for loop in loops for reward in loop.rewards]
        if trainer.global_step % self.every_n_steps == 0:
            self._line(trainer, (*_LINE_METRICS, *(f"reward/{reward.label}" for reward in rewards)))
        if trainer.is_global_zero and trainer.global_step <= _FIRST_STEPS:
            self._warn_of_flat([reward for reward in rewards if reward.weight], trainer.callback_metrics)
        if trainer.is_global_zero and not self._far_from_ref:
            self._far_from_ref = warn_of_kl(trainer.global_step, trainer.callback_metrics)

    def _warn_of_flat(self, rewards: list[RewardFunction], metrics: Mapping[str, Tensor]) -> None:
        for label in [reward.label for reward in rewards]:
            mean, spread = (float(metrics.get(f"reward/{label}{end}", math.nan)) for end in ("", "_std"))
            if not spread <= 1e-6 * abs(mean):  # NaN where it applied to no response
                continue
            self._flat[label, f"{mean:.6g}"] += 1
            if self._flat[label, f"{mean:.6g}"] == _FIRST_STEPS:
                log.warning(
                    "reward %s gave every response %.6g for %d steps: nothing is learnt from that; if it should tell "
                    "them apart, look at what it compares (the number 7 is not the text '7'), and at the responses, "
                    "which RolloutLog writes to rollouts/",
                    *(label, mean, _FIRST_STEPS),
                )

    def on_validation_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Print one line."""
        if not trainer.sanity_checking:
            self._line(trainer, tuple(name for name in trainer.callback_metrics if name.startswith("val/")))

    def _line(self, trainer: Trainer, names: tuple[str, ...]) -> None:
        if not trainer.is_global_zero or _draws_a_bar(trainer):
            return
        metrics = trainer.callback_metrics
        shown = [f"{name} {_number(float(metrics[name]))}" for name in names if name in metrics]
        print(f"step {trainer.global_step}: {'  '.join(shown)}", flush=True)


def warn_of_kl(step: int, metrics: Mapping[str, Tensor]) -> bool:
    """Log a warning and return True if the policy is more than 0.1 nats per response token from the reference.

    Args:
        step: number of the step, from 1.
        metrics: metrics of the step; without ``kl/ref`` in a run without a reference.
    """
    kl, tokens = (float(metrics.get(name, math.nan)) for name in ("kl/ref", "rollout/response_tokens_mean"))
    if not kl > _MOST_KL_PER_TOKEN * tokens:  # NaN where one is missing
        return False
    log.warning(
        "step %d: kl/ref is %.3g nats per response, %.2g per token, above %g: the policy moves away from the "
        "reference, which often ends in worse responses. Lower the learning rate "
        "(model.init_args.actor_optimizer.init_args.lr) or raise the coef of kl_loss or kl_reward",
        *(step, kl, kl / tokens, _MOST_KL_PER_TOKEN),
    )
    return True


def _draws_a_bar(trainer: Trainer) -> bool:
    return sys.stdout.isatty() and trainer.progress_bar_callback is not None


def _heartbeat(step: int, ended: threading.Event) -> None:
    """Print a line each minute until a step has ended."""
    minutes = 0
    while not ended.wait(_HEARTBEAT_SECONDS):
        minutes += 1
        print(f"step {step}: under way for {minutes * _HEARTBEAT_SECONDS:.0f} s", flush=True)


def unused_validation(trainer: Any, steps: float) -> str:
    """Return a line about validation data that the run ends too early for; empty where they are used.

    Args:
        trainer: at the start of a fit.
        steps: steps of the run.
    """
    every = trainer.val_check_batch
    at_ends = any(isinstance(callback, RolloutLoop) and callback.validate_at_ends for callback in trainer.callbacks)
    if at_ends or "val" not in trainer.datamodule.reports or not math.isfinite(every) or steps >= every:
        return ""
    return f"val data: not used, because the run ends after {steps} steps: set trainer.val_check_interval below {every}"


def trust_in_reward_model(module: RLHFModule) -> list[str]:
    """Return a line on the metrics that were exported with the reward model, if any."""
    source = module.sources.get("reward_model")
    path = Path(source.path) / "metrics.json" if isinstance(source, Pretrained) else Path()
    if not path.is_file():
        return []
    exported = json.loads(path.read_text())
    known = {"held-out pairs": "val/pair_accuracy", "samples of the policy": "val/policy_order"}
    figures = [f"{exported[name]:.3f} of {what}" for what, name in known.items() if name in exported]
    return [f"reward model: orders rightly {', '.join(figures)}"] if figures else []


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
