"""GracefulShutdown: a run that is asked to end writes a checkpoint first, and is gone within the grace period."""

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

from lightning_rlhf.compat import disable_signal_handlers
from lightning_rlhf.interrupts import Interrupted, signal_name
from lightning_rlhf.strategies import ranks

from .checkpoint import RunCheckpoint

log = logging.getLogger(__name__)
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, set by SLURM since 22.05
_MARGIN_SECONDS = 30.0  # to write the checkpoint and to end
_SAME_SECONDS = 1.0  # a scheduler signals all processes of a run, and so does the one that launched the others


class GracefulShutdown(Callback):
    """Ends a run on SIGTERM, on Ctrl-C, and before a SLURM job's time is over, with a checkpoint to resume from.

    In a single process a signal that comes while responses are generated or scored, or while the run validates, ends
    it there, with a checkpoint of the last finished step. Within an update, and on several ranks, the run continues to
    the end of its step; all ranks agree on which. The exit code is 143 after SIGTERM and 130 after Ctrl-C. A second
    signal, a second or more later, ends the process at once.

    Kubernetes sends SIGTERM 30 seconds before SIGKILL, SLURM does so 30 seconds before the end of a preempted job
    (``KillWait``). A process that is still there when the grace period is over, because a step or an engine takes
    longer, ends with its last checkpoint and the same exit code.

    An engine or a reward function that fails between two steps, in a single process, also leaves a checkpoint of the
    last finished step.

    Args:
        grace_seconds: longest time from SIGTERM to the end, positive.
    """

    def __init__(self, grace_seconds: float = 25.0) -> None:
        if not grace_seconds > 0:
            raise ValueError(f"grace_seconds must be positive, got {grace_seconds}")
        self.grace_seconds = grace_seconds
        self._previous: dict[int, Any] = {}
        self._trainer: Trainer | None = None
        self._signal, self._signalled_at = 0, 0.0  # number and time of the signal that this process received
        self._agreed: Interrupted | None = None  # by all ranks, at the end of a step
        self._began = 0.0
        self._longest = 0.0  # seconds of a step

    # -- signals ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the signals from Lightning, which would end with exit code 0, or save within an update."""
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        disable_signal_handlers(trainer)
        self._trainer = trainer
        self._signal = 0
        self._agreed = None
        self._longest = 0.0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if "SLURM_JOB_ID" in os.environ:
            numbers.append(signal.SIGUSR1)  # sbatch --signal=USR1@90, which Lightning's users know
        for number in numbers:
            self._previous[number] = signal.signal(number, self._receive)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
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
            _print(f"second signal ({signal_name(number)}): ended at once")
            _leave(128 + number)
        self._signal, self._signalled_at = number, now
        if number == signal.SIGTERM:
            timer = threading.Timer(self.grace_seconds, self._give_up, [number])
            timer.daemon = True
            timer.start()
        if number != signal.SIGINT and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(number)  # a terminal sends Ctrl-C to the whole group, a scheduler only to this process
        last = last_checkpoint(self._trainer)
        started = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
        between_steps = self._trainer.world_size == 1 and last is not None and last.between_steps
        if between_steps or not started:
            raise Interrupted(number)
        if self._trainer.is_global_zero:
            again = "another Ctrl-C" if number == signal.SIGINT else "a second signal"
            step = self._trainer.global_step + 1
            _print(f"{signal_name(number)}: the run ends after step {step}; {again} ends it at once")

    def _give_up(self, number: int) -> None:
        unfinished = f"ended {self.grace_seconds:g} s after {signal_name(number)}, before the step and its checkpoint"
        try:
            resume = f"; {how_to_resume(self._trainer)}" if self._trainer is not None else ""
            _print(f"{unfinished} were finished{resume}")
        finally:
            _leave(128 + number)

    # -- the ends of steps -------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure steps."""
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree with the other ranks on whether the run ends here; RunCheckpoint, which comes last, then saves."""
        now = time.monotonic()
        self._longest, self._began = max(self._longest, now - self._began), now
        wish = self._signal, self._job_ends_within(self._longest + _MARGIN_SECONDS)
        numbers, over = zip(*ranks.from_all_ranks(wish), strict=True)
        if number := max(numbers):
            self._agreed = Interrupted(number)
        elif any(over):
            self._agreed = Interrupted(signal.SIGTERM, "because the job's time is nearly over")

    @property
    def ends_now(self) -> bool:
        """Whether the run ends with the step that has just been made."""
        return self._agreed is not None

    def _job_ends_within(self, seconds: float) -> bool:
        end = os.environ.get(_SLURM_END, "")
        return end.isdecimal() and int(end) - time.time() < seconds

    def _end_if_agreed(self) -> None:
        if self._agreed is not None:
            raise self._agreed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End before the next step."""
        self._end_if_agreed()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before a validation; the resumed run makes it."""
        self._end_if_agreed()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before the next epoch."""
        self._end_if_agreed()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state of the last finished step, where nothing has changed since; then give the signals back."""
        last = last_checkpoint(trainer)
        if last is not None and (trainer.world_size == 1 or exception is self._agreed):
            try:
                last.save_between_steps(trainer)
            except (OSError, ValueError, FloatingPointError, SafetensorError) as error:
                log.warning("No checkpoint could be written before the end: %s", error)
        if not isinstance(exception, Interrupted):
            self.teardown(trainer, pl_module, "fit")


def last_checkpoint(trainer: Trainer) -> RunCheckpoint | None:
    """Return the callback that saves the last checkpoint, if there is one."""
    callbacks = (c for c in trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint) and c.monitor is None)
    return next(callbacks, None)


def can_resume(trainer: Trainer) -> bool:
    """Return whether there is a checkpoint of this run to resume from."""
    last = last_checkpoint(trainer)
    return last is not None and last.saved_step is not None


def how_to_resume(trainer: Trainer) -> str:
    """Return one line on the step from which an interrupted run can be resumed."""
    last = last_checkpoint(trainer)
    path = Path(trainer.default_root_dir) / "checkpoints/last.ckpt"
    if last is None:
        return "this run has no RunCheckpoint to resume from"
    if last.saved_step is None:
        return "no checkpoint was written yet, the same command starts again"
    return f"the same command with --ckpt_path last goes on from step {last.saved_step} ({path})"


@rank_zero_only
def _print(sentence: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"lightning-rlhf: {sentence}\n".encode())


def _leave(code: int) -> None:
    """End this process without waiting for anything; engines and reward workers end with it."""
    os._exit(code)
