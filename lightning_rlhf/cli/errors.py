"""Errors of the command line: a one-line message and an exit code for expected errors, a traceback for bugs."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf.expected_errors import ExpectedError, Interrupted

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
printed: dict[str, Sequence[str]] = {}  # mistakes that the early check of this command has printed, with their names


class CLIError(ExpectedError):
    """Ends a command with a one-line message and an exit code.

    Args:
        message: message; empty if another rank prints it.
        code: 2 for a mistake found before the work starts, 1 for a later failure, 128 + n after signal n.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def one_line_errors(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command to print an expected error in one line and return its exit code, by default 2."""

    @functools.wraps(command)
    def run(*args: Any) -> int:
        try:
            return command(*args)
        except ExpectedError as error:
            if message := unprinted(str(error)):
                print(f"lightning-rlhf: {message}", file=sys.stderr)
            return error.code if isinstance(error, CLIError) else 2

    return run


def print_cause(error: BaseException) -> None:
    """Print the traceback of an error's cause, such as an exception in a user's function."""
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)


def interrupt_of(error: BaseException) -> Interrupted | None:
    """Return the interrupt that an error carries, else None; Lightning turns an interrupt into a SystemExit."""
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, Interrupted):
        return cause
    if isinstance(cause, KeyboardInterrupt):
        return Interrupted(signal.SIGINT)
    return None


def disk_error(error: BaseException, directory: Path) -> str | None:
    """Return a message if a full disk or a removed file of the run ended it, else None.

    Args:
        error: error that ended the run.
    """
    cause: BaseException | None = error
    visited: list[BaseException] = []
    while cause is not None and cause not in visited:  # the chain of a re-raised error may be circular
        visited.append(cause)
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return f"the disk of {directory} is full ({cause.strerror or cause}): free space on it"
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename))
            if path.absolute().is_relative_to(directory.absolute()):
                return f"{path} was removed while the run wrote to it: do not change {directory} during a run"
        cause = cause.__cause__ or cause.__context__
    return None


def one_line(error: BaseException) -> str:
    """Return the message of an error without its line breaks."""
    return " ".join(str(error).split())


def in_one_message(mistakes: Sequence[str]) -> str:
    """Return a message with several mistakes of a configuration, one in a line; a single one is returned as it is."""
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n".join([f"{len(mistakes)} mistakes in the configuration:", *(f"  {mistake}" for mistake in mistakes)])


def unprinted(message: str) -> str:
    """Return the mistakes in an error's message that the early check has not printed."""
    lines = message.splitlines()
    mistakes = [line.strip() for line in (lines[1:] if re.match(r"\d+ mistakes in", message) else lines)]
    texts = [name for names in printed.values() for name in names if " " in name]  # of another library's message
    remaining = [mistake for mistake in mistakes if mistake not in printed and not any(t in mistake for t in texts)]
    if len(remaining) == len(mistakes):
        return message
    return in_one_message(remaining) if remaining else ""


def is_about_a_printed_one(message: str) -> bool:
    """Return whether the parser's own message names an option that a printed mistake is about."""
    names = {name for of_one in printed.values() for name in of_one}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names)
