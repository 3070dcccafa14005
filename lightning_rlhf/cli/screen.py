"""Messages on the screen: this package's log, Lightning's messages without the routine ones, and the last line."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.expected_errors import for_terminal

log = logging.getLogger("lightning_rlhf")
# Warnings that do not apply to runs of this package: rows are tokenised in advance, so loader workers have nothing to
# do; the mode of each role is set separately; logged values are already reduced over ranks.
_WARNINGS = (
    r".*does not have many workers.*",
    r".*module\(s\) in eval mode.*",
    r".*recommended to use `self.log\(.*sync_dist=True\)`.*",
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning uses a renamed function of torch
    r"`torch.distributed.\w+` is deprecated.*",  # used by DeepSpeed
    r"\s*Unable to serialize instance cpu\b",  # jsonargparse, about a torch.device among the defaults of a callback
    r"Using ModelCheckpoint with manual optimization.*",  # twelve lines at every save
)
# Messages that appear in every run, or that this package's own lines repeat.
_ROUTINE = re.compile(
    r"GPU available|TPU available|HPU available|Using |💡|Seed set to|Restor(ing|ed all) states|LOCAL_RANK|"
    r"Initializing distributed|-{20,}\s*distributed_backend|All distributed processes registered|"
    r"`Trainer\((limit_|overfit_|val_check|fast_dev)|`Trainer.fit` stopped|Trainer already configured with|"
    r"Detected KeyboardInterrupt|Enabling DeepSpeed|initializing deepspeed|\[rank: \d+\] Seed set|Loaded model weights|"
    r"Running in `fast_dev_run`",
)


class RoutineFilter(logging.Filter):
    """Drops the messages that Lightning logs in every run; profiles, summaries and early stops are kept."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        return record.levelno >= logging.WARNING or _ROUTINE.match(record.getMessage().strip()) is None


class TerminalFormatter(logging.Formatter):
    """Shows control characters, which texts of data may contain, as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return for_terminal(super().format(record))


def configure_messages() -> None:
    """Show this package's log and Lightning's messages on stdout, without routine messages and warnings."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(RoutineFilter())
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # kernels of the hub are not used
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False
    is_first = getattr(rank_zero_only, "rank", 0) == 0  # other ranks would repeat the lines
    log.setLevel(logging.INFO if is_first else logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(TerminalFormatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False


def last_line(trainer: Trainer) -> str:
    """Return why a ``fit`` ended and where its results are."""
    return f"ended after step {trainer.global_step}: {_reason(trainer)}; results are in {trainer.default_root_dir}"


def _reason(trainer: Any) -> str:
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"max_steps is {trainer.max_steps}"
    for callback in trainer.callbacks:
        # Where the run did not stop, the message is an earlier run's, from the checkpoint.
        message = trainer.should_stop and getattr(callback, "stopping_reason_message", None)
        if message:
            return f"{type(callback).__name__} stopped it: {message.partition('. ')[0]}"
        if isinstance(callback, Timer) and (remaining := callback.time_remaining()) is not None and remaining <= 0:
            return "max_time was reached"
    if trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch:
        return f"max_epochs is {trainer.max_epochs}"
    return "a callback stopped it" if trainer.should_stop else "the data ended"
