"""Expected errors, which the command line prints as one line; for any other error it prints a traceback."""

from __future__ import annotations


class ExpectedError(Exception):
    """Base class of errors in a user's input or environment; messages contain value, allowed values and remedy.

    Each subclass also inherits from a built-in exception, which callers in Python may catch.
    """


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
