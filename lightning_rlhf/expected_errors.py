"""Errors and interrupts that the command line prints as one line, and the wording of numbers in messages.

For any other error the command line prints a traceback.
"""

from __future__ import annotations

import math
import re
import signal


class ExpectedError(Exception):
    """Base class of errors whose cause is outside of this package, such as a user's input or a server.

    A message must contain the value, the allowed values and the remedy. Each subclass also inherits from a built-in
    exception, which callers in Python may catch.
    """

    def __str__(self) -> str:
        return for_terminal(super().__str__())


class UsageError(ExpectedError, ValueError):
    """Error in an argument, a configuration, a model or data."""


class RunError(ExpectedError, RuntimeError):
    """Failure of a run in a component outside the trainer, such as an engine, a reward function or a server."""


class MissingFileError(ExpectedError, FileNotFoundError):
    """Missing file, model or data set."""


class MissingPackageError(ExpectedError, ModuleNotFoundError):
    """Missing optional package."""


class NonFiniteError(ExpectedError, FloatingPointError):
    """NaN or infinity in a loss or a gradient."""


class EngineDied(RunError):
    """Error for an engine that has ended; the message contains the cause and the path of its log."""


class Interrupted(KeyboardInterrupt):
    """Interrupt of a run, raised where the run's state is consistent, or at once after a second signal.

    Args:
        number: number of the signal.
        reason: short reason for messages; None uses the name of the signal.
    """

    def __init__(self, number: int, reason: str | None = None) -> None:
        self.number = number
        self.reason = reason or f"by {signal_name(number)}"
        super().__init__(self.reason)

    @property
    def exit_code(self) -> int:
        """Exit code as reported by shells, 128 plus the signal's number: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number


def signal_name(number: int) -> str:
    """Return the name of a signal for messages: ``Ctrl-C`` for SIGINT, otherwise, for example, ``SIGTERM``."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(number).name


def for_terminal(text: str) -> str:
    r"""Return a text whose control characters, but line breaks and tabs, are escapes such as ``\x1b``.

    Texts of data, models and servers could otherwise set the colours or the title of the terminal, or clear it.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as ``1 row``, ``3 rows`` or, for infinity, ``any number of rows``.

    Args:
        number: count; infinite for the steps of a run without an end.
        noun: singular noun whose plural ends with s or es.
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    amount = "any number of" if number == math.inf else number
    return f"{amount} {noun}{ending if number != 1 else ''}"
