"""Console and StepProgressBar: a description of the run, then a line per step or a progress bar."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, Timer

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.records.run_files import read_metrics
from lightning_rlhf.callbacks.records.run_reader import RunPrinter, RunReader
from lightning_rlhf.compat import optimizer_at
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.expected_errors import counted
from lightning_rlhf.extras.console.held_out import (
    before_and_after,
    left_to_learn,
    unchanged_kinds,
    whether_to_continue,
)
from lightning_rlhf.extras.records.metrics_csv import MetricsCSV
from lightning_rlhf.extras.records.val_metrics import shown_names, with_interval
from lightning_rlhf.extras.rewards.answers import most_frequent_answer
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.ranges import check_at_least

log = logging.getLogger(__name__)
_HEARTBEAT_SECONDS = 60.0
_WAITING_SECONDS = 5.0  # between the first two lines before the first step
_UNKNOWN_SECONDS = 20.0  # between two lines of work whose usual time is unknown: a first step, a later validation
_TIMED_STEPS = 3  # before the first line about the remaining time
_RECENT_STEPS = 20  # whose median time is the estimate
_SHORT_SECONDS = 300.0  # of a run that needs no such line
_LINE_METRICS = (
    "train/loss", "train/pair_accuracy", "reward/mean", "reward/std", "kl/ref", "loss/policy", "loss/value",
    "loss/distillation", "policy/entropy", "perf/tokens_per_s",
)  # fmt: skip
_OF_A_SOURCE = re.compile(r"mixture/.+/(loss|reward|response_tokens)")


class StepProgressBar(RichProgressBar):
    """Lightning's rich progress bar, with steps counted and without the logger's version number."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics of the progress bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        epochs = self.trainer.max_epochs or 1
        if epochs <= 1:
            return "Steps"
        return f"Epoch {current_epoch + 1} of {epochs}, steps"


class Console(RunPrinter):
    """Prints a description of the run, then a line every n steps and per validation if the output is not a terminal.

    Until the first step, lines tell you what the run is working on. They come every five seconds at first, then after
    each fifth of the time so far, at least once in a minute. In the first step and in validations between steps, you
    get such a line every 20 seconds, in further steps every minute. After three steps, and after each quarter of the
    run, a line estimates how long the rest will take, if that is more than five minutes. The last lines compare the
    first and the last validation.

    Args:
        every_n_steps: steps between two lines, at least 1.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        check_at_least(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._ended: threading.Event | None = None
        self._began = 0.0
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)  # of the last steps
        self._steps = 0  # of this process
        self._earlier: float | None = None  # median seconds of a step in the part of the run that is resumed
        self._doing = ""  # work before the first step, or validation
        self._doing_since = 0.0
        self._shown: list[str] = []  # metrics of validations that were shown

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Validate the module, and start to print the work in progress."""
        check_module(self, pl_module, RoleModule)
        if _rollout_loop(trainer) is None:
            self._do("loading the models")
        else:
            self._do("starting the engine, loading the models")
        self._print_regularly(trainer, lambda: (self._doing, self._doing_since), _WAITING_SECONDS)

    def on_fit_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Update the line about the work in progress: the models are loaded."""
        if _rollout_loop(trainer) is None:
            self._do("preparing the run")
        else:
            self._do("starting the engine")

    def _do(self, work: str) -> None:
        """Set the work in progress that lines name."""
        if work != self._doing:
            self._doing, self._doing_since = work, time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Print the description of the run."""
        self._seconds.clear()
        self._steps = 0
        self._do("preparing the first step")
        if trainer.is_global_zero:
            rows = read_metrics(Path(trainer.default_root_dir) / "metrics.csv") if trainer.global_step else []
            earlier = [float(row["time/step_s"]) for row in rows if row.get("time/step_s")]
            self._earlier = median(earlier) if earlier else None
            print("\n".join(self.description(trainer, pl_module)), flush=True)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: RoleModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Update the line about the work in progress: a batch of the validation."""
        count = sum(int(number) for number in trainer.num_val_batches if math.isfinite(number))
        if batch_idx == 0:
            self._do("validation")
        self._doing = f"validation, batch {batch_idx + 1} of {count}"
        printing = self._ended is not None and not self._ended.is_set()
        if not (printing or _draws_a_bar(trainer)):  # between two steps
            self._print_regularly(trainer, lambda: (self._doing, self._doing_since), _UNKNOWN_SECONDS)

    def description(self, trainer: Trainer, module: RoleModule) -> list[str]:
        """Return lines about models, data, batch arithmetic, engine and device."""
        data = trainer.datamodule
        trained = module.parameter_counts(trained=True)
        sizes = [
            f"{name} {_count(n)}" + (f" ({_count(trained[name])} trained)" if 0 < trained[name] < n else "")
            for name, n in module.parameter_counts().items()
        ]
        threads = f"{module.device.type}, {counted(torch.get_num_threads(), 'thread')}"
        device = torch.cuda.get_device_name() if module.device.type == "cuda" else threads
        lines = [f"{type(module).__name__}: {', '.join(sizes)} parameters on {device}", *frozen_weights(module)]
        if trainer.world_size > 1:
            nodes = counted(trainer.num_nodes, "node")
            lines.append(f"{type(trainer.strategy).__name__}: {trainer.world_size} processes on {nodes}")
        lines += [str(report) for report in data.reports.values()]
        steps = _steps_of(trainer)
        loop = _rollout_loop(trainer)
        if isinstance(module, RLHFModule) and loop is not None:
            prompts = loop.prompts_per_step(data)
            responses = prompts * loop.group_size
            minibatches = responses // module.minibatch_size
            candidates = ""
            if data.batch_size > prompts:
                candidates = f" of up to {data.batch_size}"
            lines.append(
                f"one step: {prompts}{candidates} prompts x {loop.group_size} = {responses} responses, "
                f"{module.update_epochs} x {counted(minibatches, 'mini-batch')} of {module.minibatch_size} "
                f"= {counted(minibatches * module.update_epochs, 'update')}; {counted(steps, 'step')}"
            )
            lines.append(f"rollouts: {loop.engine_description}, at most {loop.max_response_tokens} tokens")
            if any(reward.weight != 1 for reward in loop.rewards):
                lines.append(f"reward: {' + '.join(f'{each.weight:g} x {each.label}' for each in loop.rewards)}")
            lines += reward_model_accuracy(module)
        else:
            lines.append(f"one step: {counted(data.batch_size, 'row')}, one update; {counted(steps, 'step')}")
        if unused := unused_validation(trainer, steps):
            lines.append(unused)
        lines += learning_rates(module)
        lines.append(f"run directory: {trainer.default_root_dir}")
        return lines

    def on_train_batch_start(self, trainer: Trainer, pl_module: RoleModule, batch: Any, batch_idx: int) -> None:
        """Start to print lines about the step while it takes long."""
        self._began = time.monotonic()
        self._stop()
        if not _draws_a_bar(trainer):
            text, began = f"step {trainer.global_step + 1}: running", self._began
            interval = _UNKNOWN_SECONDS
            usual = median(self._seconds) if self._seconds else self._earlier
            if usual is not None:
                text += f", steps before took {usual:.3g} s"
                interval = _HEARTBEAT_SECONDS
            self._print_regularly(trainer, lambda: (text, began), interval)

    def on_exception(self, trainer: Trainer, pl_module: RoleModule, exception: BaseException) -> None:
        """Stop printing the work in progress."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Stop printing the work in progress."""
        self._stop()

    def _print_regularly(self, trainer: Trainer, doing: Callable[[], tuple[str, float]], seconds: float) -> None:
        """Print the work in progress, and the seconds since it began, every few seconds, until it is stopped."""
        self._stop()
        if trainer.is_global_zero:
            self._ended = threading.Event()
            threading.Thread(target=_print_until, args=(self._ended, doing, seconds), daemon=True).start()

    def _stop(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print one line."""
        self._stop()
        loop = _rollout_loop(trainer)
        rewards = [] if loop is None else loop.rewards
        if trainer.global_step % self.every_n_steps == 0:
            self._line(trainer, (*_LINE_METRICS, *(f"reward/{reward.label}" for reward in rewards)))
            if of_sources := sorted(filter(_OF_A_SOURCE.fullmatch, trainer.callback_metrics)):
                self._line(trainer, of_sources)
        self._seconds.append(time.monotonic() - self._began)
        self._steps += 1
        total = _steps_of(trainer)
        quarter = math.isfinite(total) and trainer.global_step % math.ceil(total / 4) == 0
        if self._steps == _TIMED_STEPS or (quarter and self._steps > _TIMED_STEPS):
            remaining = remaining_time(total - trainer.global_step, self._seconds, _time_limit(trainer))
            if remaining and trainer.is_global_zero and not _draws_a_bar(trainer):
                print(remaining, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Print the metrics of the validation, those of a source or an environment in a separate line."""
        if self._steps or not trainer.training:
            self._stop()
        else:
            self._do("preparing the first step")
        if not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            names = shown_names(metrics)
            self._shown = list(dict.fromkeys([*self._shown, *names]))  # a reward that equals another one later stays
            lines = defaultdict[str, list[str]](list)
            for name in metrics:
                if name in self._shown and (name.count("/") == 1 or "/fraction_correct_" in name):
                    lines[name.rpartition("/")[0]].append(name)
            for line in lines.values():
                self._line(trainer, line)
            if trainer.is_global_zero and trainer.global_step == 0:
                most_frequent = None
                if isinstance(trainer.datamodule, PromptDataModule):
                    most_frequent = most_frequent_answer(trainer.datamodule, "val")
                if sentence := left_to_learn(metrics, most_frequent):
                    print(sentence, flush=True)

    def on_fit_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Print the first and the last validation, unless another callback prints them."""
        if (
            trainer.is_global_zero
            and not trainer.fast_dev_run
            and not any(isinstance(each, RunReader) and each.prints_comparison for each in trainer.callbacks)
            and _has(trainer, MetricsCSV)
        ):
            print("".join(f"{line}\n" for line in comparison(Path(trainer.default_root_dir))), end="", flush=True)

    def _line(self, trainer: Trainer, names: Sequence[str]) -> None:
        if not trainer.is_global_zero or _draws_a_bar(trainer):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        shown = [f"{name} {with_interval(name, metrics)}" for name in names if name in metrics]
        print(f"step {trainer.global_step}: {'  '.join(shown)}", flush=True)


def remaining_time(steps: float, seconds: Collection[float], limit: float = math.inf) -> str:
    """Return a line about the time of the remaining steps; empty if it is short.

    Args:
        steps: number of remaining steps; infinite without an end.
        seconds: seconds of the last steps.
        limit: seconds until ``max_time`` ends the run; infinite without it.
    """
    total = steps * median(seconds)
    if not _SHORT_SECONDS < min(total, limit) < math.inf:
        return ""
    if limit < total:
        return f"{limit / 60:.0f} minutes left of max_time: about {limit / median(seconds):.0f} more steps"
    duration = f"{total / 60:.0f} minutes" if total < 7200 else f"{total / 3600:.1f} hours"
    return (
        f"{counted(steps, 'step')} left: about {duration}, at {median(seconds):.3g} s for a step, without validations"
    )


def _time_limit(trainer: Trainer) -> float:
    """Return the seconds until ``max_time`` ends the run; infinity without it."""
    timers = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
    left = [timer.time_remaining() for timer in timers]
    return min((seconds for seconds in left if seconds is not None), default=math.inf)


def _steps_of(trainer: Trainer) -> float:
    """Return the number of steps of a run; infinity for a run that only a time limit ends."""
    if trainer.max_steps > 0:
        return trainer.max_steps
    if trainer.max_epochs == -1:
        return math.inf
    return trainer.num_training_batches * (trainer.max_epochs or 1)


def _rollout_loop(trainer: Trainer) -> RolloutLoop | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)), None)


def _draws_a_bar(trainer: Trainer) -> bool:
    return sys.stdout.isatty() and trainer.progress_bar_callback is not None


def _has(trainer: Any, kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callbacks)


def _print_until(ended: threading.Event, doing: Callable[[], tuple[str, float]], seconds: float) -> None:
    """Print the work in progress, with its seconds so far, until it has ended; less often the longer it takes."""
    passed = 0.0
    while not ended.wait(max(seconds, min(passed / 5, _HEARTBEAT_SECONDS))):
        text, began = doing()
        passed = time.monotonic() - began
        print(f"{text} ({passed:.0f} s)", flush=True)


def comparison(directory: Path) -> list[str]:
    """Return lines that compare the first and the last validation of a run; none with fewer than two.

    Args:
        directory: directory of the run, with ``metrics.csv``.
    """
    rows = read_metrics(directory / "metrics.csv")
    compared = before_and_after(rows)
    if compared is None:
        return []
    first, last, values = compared
    width = max((len(name) for name, *_ in values), default=0)
    lines = []
    for name, before, after, change in values:
        lines.append(f"  {name:<{width}}  {before} -> {after}{f', change {change}' if change else ''}")
    if lines:
        lines += [sentence for sentence in (unchanged_kinds(rows), whether_to_continue(rows)) if sentence]
        return [f"validation at step {first} -> step {last}, 95 % intervals in brackets:", *lines]
    return []


def frozen_weights(module: RoleModule) -> list[str]:
    """Return lines about weights of roles: which frozen ones are shared, quantized or in bfloat16; float32 masters."""
    lines = []
    groups = defaultdict[str, list[str]](list)
    for name in module.sources:
        if (first := module.shared_base_of(name)) is not None:
            groups[first].append(name)
    lines += [f"{', '.join(names)}: one copy of the frozen weights" for names in groups.values()]
    kinds = defaultdict[str, list[str]](list)
    for name, source in module.sources.items():
        is_frozen = name in module.frozen_roles or source.lora is not None
        if isinstance(source, Pretrained) and source.quantization is not None:
            kinds[source.quantization].append(name)
        elif is_frozen and source.dtype == "bfloat16":
            kinds["bfloat16"].append(name)
    masters = [name for name in module.trained_roles if getattr(getattr(module, name), "computes_in_bfloat16", False)]
    if masters:
        lines.append(f"{', '.join(masters)}: float32 weights, products in bfloat16")
    return [*lines, *(f"{', '.join(names)}: frozen weights in {kind}" for kind, names in kinds.items())]


def learning_rates(module: RoleModule) -> list[str]:
    """Return a line with the learning rate and the optimizer of each role that learns, before any schedule."""
    rates = []
    for i, name in enumerate(module.trained_roles):
        optimizer = optimizer_at(module, i)
        group = optimizer.param_groups[0]
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # DeepSpeed's contain the configured one
        rates.append(f"{name} {group.get('initial_lr', group['lr']):g} ({kind})")
    return [f"learning rate: {', '.join(rates)}"]


def unused_validation(trainer: Any, steps: float) -> str:
    """Return a line about validation data that the run is too short to use; empty if they are used.

    Args:
        trainer: trainer at the start of a fit.
        steps: number of steps of the run.
    """
    every = trainer.val_check_batch
    loop = _rollout_loop(trainer)
    at_ends = loop is not None and loop.validate_at_ends
    if at_ends or "val" not in trainer.datamodule.reports or not math.isfinite(every) or steps >= every:
        return ""
    end = counted(steps, "step")
    other = "" if loop is None else ", or validate_at_ends of RolloutLoop to true"
    least = f"set trainer.val_check_interval to at most {steps:.0f}{other}"
    return f"val data: not used, because the run ends after {end}: {least}"


def reward_model_accuracy(module: RLHFModule) -> list[str]:
    """Return a line about the accuracies that were exported with the reward model, if any."""
    source = module.sources.get("reward_model")
    path = Path(source.path) / "metrics.json" if isinstance(source, Pretrained) else Path()
    if not path.is_file():
        return []
    exported = json.loads(path.read_text())
    labels = {"val/pair_accuracy": "held-out pairs", "val/policy_order": "samples of the policy"}
    figures = [f"{exported[name]:.3f} of {label}" for name, label in labels.items() if exported.get(name) is not None]
    if figures:
        return [f"reward model: orders correctly {', '.join(figures)}"]
    return []


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)
