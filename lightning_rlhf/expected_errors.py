"""Expected errors, which users see as a one-line message, as opposed to bugs, which show a traceback."""

from __future__ import annotations

import traceback

from lightning.fabric.utilities.exceptions import MisconfigurationException

# Types of expected errors; a KeyError or an AssertionError is a bug.
_TYPES = (ValueError, RuntimeError, FileNotFoundError, ModuleNotFoundError, FloatingPointError)


def raising_module(error: BaseException) -> str:
    """Return the dotted name of the module whose code raised an error; empty if it was never raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def is_expected(error: BaseException) -> bool:
    """Return whether an error is an expected error of this package."""
    return isinstance(error, _TYPES) and raising_module(error).startswith("lightning_rlhf.")


def is_lightning_error(error: BaseException) -> bool:
    """Return whether Lightning raised an error because it cannot run with its arguments."""
    kinds = MisconfigurationException | ValueError | RuntimeError | ImportError
    return isinstance(error, kinds) and raising_module(error).startswith("lightning.")


def exit_code(error: BaseException, started: bool) -> int:
    """Return the exit code of a run that an error ends.

    Args:
        error: the exception.
        started: whether the first training step has begun.

    Returns:
        2 for a mistake found before the first training step, else 1.
    """
    return 2 if not started and (is_expected(error) or is_lightning_error(error)) else 1
