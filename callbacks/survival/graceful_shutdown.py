"""GracefulShutdown: saves a checkpoint after a signal and ends the run within the grace period."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError

from lightning_rlhf.callbacks.records.run_reader import RunReader
from lightning_rlhf.callbacks.survival.checkpoint import last_checkpoint
from lightning_rlhf.compat import disable_signal_handlers
from lightning_rlhf.expected_errors import Interrupted, signal_name
from lightning_rlhf.ranges import check_range
from lightning_rlhf.strategies import ranks

log = logging.getLogger(__name__)
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, set by SLURM since 22.05
_MARGIN_SECONDS = 30.0  # time to write the checkpoint and to exit
_SAME_SECONDS = 1.0  # signals within this time count as one: schedulers and the launcher both signal all processes


class GracefulShutdown(Callback):
    """Saves a checkpoint and ends the run on SIGTERM, on Ctrl-C, and before the time limit of a SLURM job.

    If you run a single process, a signal during generation, scoring or validation ends it immediately, with a
    checkpoint of the last finished step. During an update, and with several ranks, the run first finishes the step, so
    that all ranks end after the same one. The exit code is 143 after SIGTERM, 130 after Ctrl-C, and 138 after SIGUSR1
    in a SLURM job. Send a second signal, at least one second later, to end the process immediately. The end of a SLURM
    job is read from ``SLURM_JOB_END_TIME``.

    Kubernetes sends SIGTERM 30 seconds before SIGKILL. SLURM does so 30 seconds before the end of a preempted job
    (``KillWait``). If your process still runs at the end of the grace period, because a step or an engine takes longer,
    it exits with the same code, and its last checkpoint remains.

    If an engine or a reward function fails between two steps, a single process also saves the last finished step.

    Args:
        grace_seconds: longest time between SIGTERM and the exit, positive.
    """

    def __init__(self, grace_seconds: float = 25.0) -> None:
        check_range("grace_seconds", grace_seconds, "positive")
        self.grace_seconds = grace_seconds
        self._previous: dict[int, Any] = {}
        self._trainer: Trainer | None = None
        self._signal = 0  # number of the signal that this process received
        self._signalled_at = 0.0
        self._interrupt: Interrupted | None = None  # the reason on which all ranks agreed at the end of a step
        self._step_started = 0.0
        self._longest_step = 0.0  # seconds

    # -- signals ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's signal handlers, which would exit with code 0, or save during an update."""
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        disable_signal_handlers(trainer)
        self._trainer = trainer
        self._signal = 0
        self._interrupt = None
        self._longest_step = 0.0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if "SLURM_JOB_ID" in os.environ:
            numbers.append(signal.SIGUSR1)  # sbatch --signal=USR1@90, as in Lightning's documentation
        for number in numbers:
            self._previous[number] = signal.signal(number, self._receive)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._trainer = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        assert self._trainer is not None
        now = time.monotonic()
        if self._signal and now - self._signalled_at < _SAME_SECONDS:
            return
        if self._signal:
            _print(f"second signal ({signal_name(number)}): the process ends immediately")
            os._exit(128 + number)  # engines and reward workers exit when this process is gone
        self._signal = number
        self._signalled_at = now
        if number == signal.SIGTERM:
            timer = threading.Timer(self.grace_seconds, self._give_up, [number])
            timer.daemon = True
            timer.start()
        if number != signal.SIGINT and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(number)  # a terminal signals the whole group, a scheduler only this process
        last = last_checkpoint(self._trainer)
        started = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
        between_steps = self._trainer.world_size == 1 and last is not None and last.between_steps
        if between_steps or not started:
            raise Interrupted(number)
        if self._trainer.is_global_zero:
            second = "a second signal"
            if number == signal.SIGINT:
                second = "another Ctrl-C"
            limit = f", at the latest in {self.grace_seconds:g} s" if number == signal.SIGTERM else ""
            step = self._trainer.global_step + 1
            _print(f"{signal_name(number)}: the run ends after step {step}{limit}; {second} ends it immediately")

    def _give_up(self, number: int) -> None:
        try:
            resume = ""
            if self._trainer is not None:
                resume = f"; {how_to_resume(self._trainer)}"
            reason = f"{self.grace_seconds:g} s after {signal_name(number)}, during an unfinished step"
            _print(f"ended {reason}{resume}")
            if self._trainer is not None:
                end_pages(self._trainer, Interrupted(number, reason))
        finally:
            os._exit(128 + number)

    # -- ends of steps ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure the duration of steps."""
        self._step_started = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide on all ranks whether the run ends after this step; RunCheckpoint, which runs last, then saves."""
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._step_started)
        self._step_started = now
        out_of_time = self._job_ends_within(self._longest_step + _MARGIN_SECONDS)
        reasons = ranks.from_all_ranks((self._signal, out_of_time))
        if number := max(number for number, _ in reasons):
            self._interrupt = Interrupted(number)
        elif any(out_of_time for _, out_of_time in reasons):
            self._interrupt = Interrupted(signal.SIGTERM, "because the job's time is nearly over")

    @property
    def ends_now(self) -> bool:
        """Whether the run ends after the step that has just finished."""
        return self._interrupt is not None

    def _job_ends_within(self, seconds: float) -> bool:
        end = os.environ.get(_SLURM_END, "")
        return end.isdecimal() and int(end) - time.time() < seconds

    def _raise_interrupt(self) -> None:
        if self._interrupt is not None:
            raise self._interrupt

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End before the next step."""
        self._raise_interrupt()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before a validation; the resumed run performs it."""
        self._raise_interrupt()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before the next epoch."""
        self._raise_interrupt()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the last finished step if the state is unchanged; then restore the signal handlers."""
        last = last_checkpoint(trainer)
        if last is not None and (trainer.world_size == 1 or exception is self._interrupt):
            try:
                last.save_between_steps(trainer)
            except (OSError, ValueError, FloatingPointError, SafetensorError) as error:
                log.warning("The last step could not be saved: %s", error)
        if not isinstance(exception, Interrupted):
            self.teardown(trainer, pl_module, "fit")


def end_pages(trainer: Trainer, reason: Interrupted) -> None:
    """Write the reports of a run that ends without Lightning's ``on_exception``."""
    for callback in trainer.callbacks:
        if isinstance(callback, RunReader):
            callback.on_exception(trainer, trainer.lightning_module, reason)


def can_resume(trainer: Trainer) -> bool:
    """Return whether this run has saved a checkpoint."""
    last = last_checkpoint(trainer)
    return last is not None and last.saved_step is not None


def how_to_resume(trainer: Trainer) -> str:
    """Return one line about resuming an interrupted run."""
    last = last_checkpoint(trainer)
    path = Path(trainer.default_root_dir) / "checkpoints/last.ckpt"
    if last is None:
        return "it cannot be resumed, because it has no RunCheckpoint"
    if last.saved_step is None:
        return "no checkpoint was saved yet: the same command starts from the beginning"
    return f"to resume from step {last.saved_step}, add --ckpt_path last to the same command ({path})"


@rank_zero_only
def _print(message: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"lightning-rlhf: {message}\n".encode())
