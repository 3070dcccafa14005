"""Functions that run in the worker processes of :class:`.MathReward`, without torch."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_rlhf.expected_errors import UsageError


class TimeLimitError(BaseException):
    """The time limit was exceeded. A BaseException, because the code that simplifies formulas catches Exception."""


def initialize(memory_mb: int) -> None:
    """Import math-verify, then drop the environment and limit resources.

    Args:
        memory_mb: address space limit of this process, MiB.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for the formula to return
    os.environ.clear()
    import math_verify

    logging.disable(logging.CRITICAL)  # it logs each formula that it cannot parse
    math_verify.verify(math_verify.parse("$1$", parsing_timeout=None), math_verify.parse("1", parsing_timeout=None))
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def is_equal(gold: str, answer: str, seconds: float) -> bool | None:
    """Return whether a response's answer equals the correct one, None if time or memory ran out.

    Args:
        gold: correct answer, in a format for ``math_verify.parse``.
        answer: response.
        seconds: limit of processor time. It interrupts only Python code; the caller must kill a process that runs other
            code.

    Raises:
        ValueError: ``gold`` cannot be parsed.
    """
    from math_verify import parse, verify

    try:
        with _time_limit(seconds):
            correct = parse(gold, parsing_timeout=None)
            if correct:
                parsed = parse(answer, parsing_timeout=None)
                return bool(parsed) and bool(verify(correct, parsed, timeout_seconds=None))
    except (TimeLimitError, MemoryError):
        return None
    except RecursionError:
        return False
    raise UsageError(f"math-verify cannot parse the correct answer {gold[:80]!r}")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
