"""Lightning's messages that a run shows on the screen, and the line at its end."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

# At every run, or said better by the first screen and the last line.
_ROUTINE = re.compile(
    r"GPU available|TPU available|HPU available|Using |💡|Seed set to|Restor(ing|ed all) states|LOCAL_RANK|"
    r"Initializing distributed|-{20,}\s*distributed_backend|All distributed processes registered|"
    r"`Trainer\((limit_|overfit_|val_check|fast_dev)|`Trainer.fit` stopped|Trainer already configured with|"
    r"Detected KeyboardInterrupt|Enabling DeepSpeed|initializing deepspeed|\[rank: \d+\] Seed set|Loaded model weights|"
    r"Running in `fast_dev_run`",
)


class RoutineFilter(logging.Filter):
    """Drops the messages that Lightning logs at every run; profiles, summaries and early stops stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        return record.levelno >= logging.WARNING or _ROUTINE.match(record.getMessage().strip()) is None


def show_lightning() -> None:
    """Show the messages of Lightning that are not routine."""
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(RoutineFilter())
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [handler], False


def last_line(trainer: Trainer) -> str:
    """Return why a ``fit`` ended and where its results are.

    Args:
        trainer: after the fit.
    """
    return f"ended after step {trainer.global_step}: {_reason(trainer)}; results are in {trainer.default_root_dir}"


def _reason(trainer: Any) -> str:
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"max_steps is {trainer.max_steps}"
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopped_epoch:
            return f"{type(callback).__name__} stopped it: {callback.monitor} did not improve"
        if isinstance(callback, Timer) and (remaining := callback.time_remaining()) is not None and remaining <= 0:
            return "max_time is over"
    if trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch:
        return f"max_epochs is {trainer.max_epochs}"
    return "a callback stopped it" if trainer.should_stop else "the data ended"
