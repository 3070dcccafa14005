"""Console: what a person sees: what is about to run, and one line per step where no progress bar can be drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.modules.role_module import RoleModule

from .rollout_loop import RolloutLoop

_LINE_METRICS = (
    "train/loss", "train/pair_accuracy", "reward/mean", "reward/std", "kl/ref", "loss/policy", "loss/value",
    "policy/entropy", "perf/tokens_per_s",
)  # fmt: skip


class Console(Callback):
    """Prints the first screen, then a line every n steps and one per validation where output is no terminal.

    Args:
        every_n_steps: between two lines, at least 1.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """What is about to run."""
        if trainer.is_global_zero:
            print("\n".join(self.first_screen(trainer, pl_module)), flush=True)

    def first_screen(self, trainer: Trainer, module: RoleModule) -> list[str]:
        """Models, data, batch arithmetic, engine and device, a line each."""
        data = trainer.datamodule
        sizes = [f"{name} {_count(n)}" for name, n in module.parameter_counts().items()]
        threads = f"{module.device.type}, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name() if module.device.type == "cuda" else threads
        lines = [f"{type(module).__name__}: {', '.join(sizes)} parameters on {device}"]
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
        lines.append(f"run directory: {trainer.default_root_dir}")
        return lines

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One line."""
        if trainer.global_step % self.every_n_steps == 0:
            loops = [callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)]
            rules = [f"reward/{reward.label}" for loop in loops for reward in loop.rewards]
            self._line(trainer, (*_LINE_METRICS, *rules))

    def on_validation_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """One line."""
        if not trainer.sanity_checking:
            self._line(trainer, tuple(name for name in trainer.callback_metrics if name.startswith("val/")))

    def _line(self, trainer: Trainer, names: tuple[str, ...]) -> None:
        if not trainer.is_global_zero or (sys.stdout.isatty() and trainer.progress_bar_callback is not None):
            return
        metrics = trainer.callback_metrics
        shown = [f"{name} {_number(float(metrics[name]))}" for name in names if name in metrics]
        print(f"step {trainer.global_step}: {'  '.join(shown)}", flush=True)


def trust_in_reward_model(module: RLHFModule) -> list[str]:
    """What the reward model's own run found out about it, a line if anything."""
    source = module.sources.get("reward_model")
    path = Path(source.path) / "metrics.json" if isinstance(source, Pretrained) else Path()
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    known = {"held-out pairs": "val/pair_accuracy", "samples of the policy": "val/policy_order"}
    figures = [f"{found[name]:.3f} of {what}" for what, name in known.items() if name in found]
    return [f"reward model: orders rightly {', '.join(figures)}"] if figures else []


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
