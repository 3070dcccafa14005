"""Exit codes of commands that do not train."""

from __future__ import annotations

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
