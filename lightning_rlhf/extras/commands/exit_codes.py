"""Exit codes of commands that do not train."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_rlhf.cli.errors import CLIError, print_cause
from lightning_rlhf.expected_errors import ExpectedError


@contextmanager
def failure_code_1(shows_cause: bool = False) -> Iterator[None]:
    """Give expected errors exit code 1, after the work has started.

    Args:
        shows_cause: whether the traceback of the cause is printed, such as that of an error in a user's function.
    """
    try:
        yield
    except ExpectedError as error:
        if shows_cause:
            print_cause(error)
        raise CLIError(str(error), code=1) from error


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that engines and child processes end and their files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
