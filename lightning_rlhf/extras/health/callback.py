"""HealthChecks: warnings when a run does not learn as it should."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.records.run_files import HEALTH_SETTINGS, precedes, read_metrics
from lightning_rlhf.callbacks.records.run_history import is_validation
from lightning_rlhf.callbacks.records.run_reader import RunReader
from lightning_rlhf.extras.health.evidence import SHOWN_BY, responses_of
from lightning_rlhf.extras.health.monitor import Finding, HealthMonitor
from lightning_rlhf.extras.report.run_directory import read_responses
from lightning_rlhf.loggers import log_table
from lightning_rlhf.modules.rlhf import RLHFModule

log = logging.getLogger(__name__)


class HealthChecks(RunReader):
    """Warns once for each health check that fails, with the number, its bound and what you can do next.

    docs/health.md lists the checks, and :mod:`lightning_rlhf.extras.health.monitor` contains them. Some have
    further conditions. Equal groups fail only while the reward has not risen, or while its mean is below nine tenths of
    the largest. A lost reward is more than two standard errors below an earlier step's. With a reward model alone, the
    KL to the reference also fails above 0.3 nats per token while the reward has risen. The entropy fails only if the
    reward has not clearly risen since the start either, and shorter responses only while it has not risen. The critic
    fails only while rewards vary at least half as much as at the start. Over-optimisation fails only if the best
    validation is above the last one's 95 % interval. Clipping is not checked for losses with ratios of whole responses,
    and engine and actor not with ``max_staleness``. Responses that were cut in the first step already do not count as a
    consequence of another failure. A gradient spike is never reported as recovered. The checks of rewards that are
    exploited do not apply with ``dynamic_sampling``, and name the lines of the file of RolloutLog that show them.

    A resumed run reads ``metrics.csv``, if there is one, and does not repeat its warnings. The report reads the file
    ``health_settings.json``. It contains the names of the checked rewards, the names of the checks that do not apply,
    ``health_bounds`` of the callbacks, and the weights of all rewards.
    """

    def __init__(self) -> None:
        self.monitor = HealthMonitor()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the metrics before the checkpoint of a resumed run."""
        loops = [callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)]
        rewards = [reward.label for loop in loops for reward in loop.rewards if reward.weight]
        weights = {name: weight for loop in loops for name, weight in loop.reward_weights.items()}
        skipped = skipped_checks(pl_module, loops)
        of_callbacks = [getattr(callback, "health_bounds", {}) for callback in trainer.callbacks]
        bounds = {name: bound for bounds in of_callbacks for name, bound in bounds.items()}
        self.monitor = HealthMonitor(rewards, skipped, bounds, weights)
        directory = Path(trainer.default_root_dir)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            directory.mkdir(parents=True, exist_ok=True)
            settings = {"rewards": rewards, "skipped": skipped, "bounds": bounds, "weights": weights}
            (directory / HEALTH_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if trainer.is_global_zero and trainer.ckpt_path is not None:
            rows = read_metrics(directory / "metrics.csv")
            for row in [row for row in rows if precedes(row, trainer.global_step)]:
                values = {name: float(value) for name, value in row.items() if value and name != "step"}
                self.monitor.add(int(row["step"]), values)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the metrics of a step."""
        self._check(trainer, validation=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metrics of a validation during training."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._check(trainer, validation=True)

    def _check(self, trainer: Trainer, validation: bool) -> None:
        if not trainer.is_global_zero:
            return
        metrics = trainer.callback_metrics
        values = {name: float(value) for name, value in metrics.items() if is_validation(name) == validation}
        new = self.monitor.add(trainer.global_step, values)
        for finding in new:
            lines = lines_of(finding, Path(trainer.default_root_dir))
            log.warning("step %d: %s. %s%s", finding.step, finding.message, finding.remedy, lines)
        if new:
            rows = [(finding.step, finding.check, finding.message, finding.remedy) for finding in self.monitor.findings]
            for logger in trainer.loggers:
                log_table(logger, "health", ("step", "check", "message", "remedy"), rows, trainer.global_step)


def lines_of(finding: Finding, directory: Path) -> str:
    """Return a sentence with the lines of a run's file that show a finding; empty if no response shows it.

    Args:
        directory: the run's directory; without a file of RolloutLog for the step, the sentence is empty.
    """
    if finding.check not in SHOWN_BY:
        return ""
    files = sorted((directory / "rollouts").glob(f"step-{finding.step:06d}*.jsonl"))[:1]
    rows = read_responses(files, tokens=False)
    chosen = [id(row) for row in responses_of(finding.check, finding.metric, rows)]
    lines = [str(number) for number, row in enumerate(rows, 1) if id(row) in chosen]
    return f". The responses are in {files[0]}, lines {', '.join(lines)}" if lines else ""


def skipped_checks(module: LightningModule, loops: Sequence[RolloutLoop]) -> list[str]:
    """Return the names of the checks whose bounds do not apply to a run.

    Args:
        loops: its callbacks that generate rollouts.
    """
    skipped = []
    if isinstance(module, RLHFModule) and module.policy_loss.weighs_responses:
        skipped.append("clipping")
    if any(loop.max_staleness for loop in loops):
        skipped.append("engine and actor")  # the engine's weights are older than the actor's
    if any(loop.dynamic_sampling is not None for loop in loops):  # chooses prompts by their rewards
        skipped += ["second reward", "rewarded form", "one form"]
    return skipped
