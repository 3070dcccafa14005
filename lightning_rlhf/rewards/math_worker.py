"""What the worker processes of :class:`~lightning_rlhf.rewards.math.MathReward` run; without torch, to be small."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTimeError(BaseException):
    """Not an Exception: what simplifies formulas catches those and goes on."""


def prepare(memory_mb: int) -> None:
    """Give up what a formula has no use for, and load what it needs.

    Args:
        memory_mb: address space of this process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for the formula to return
    os.environ.clear()
    import math_verify

    logging.disable(logging.CRITICAL)  # each formula that it cannot read would be a line on the user's screen
    math_verify.verify(math_verify.parse("$1$", parsing_timeout=None), math_verify.parse("1", parsing_timeout=None))
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def verdict(gold: str, answer: str, seconds: float) -> bool | None:
    """Whether a response's answer equals the right one.

    Args:
        gold: the right answer, as ``math_verify.parse`` reads it.
        answer: the response.
        seconds: of processor time after which to give up. Python is interrupted; the caller ends what is not Python.

    Returns:
        None when time or memory ran out.

    Raises:
        ValueError: no answer can be read from ``gold``.
    """
    from math_verify import parse, verify

    try:
        with _within(seconds):
            right = parse(gold, parsing_timeout=None)
            if right:
                given = parse(answer, parsing_timeout=None)
                return bool(given) and bool(verify(right, given, timeout_seconds=None))
    except (OutOfTimeError, MemoryError):
        return None
    except RecursionError:
        return False
    raise ValueError(f"math-verify reads no answer from the data's {gold[:80]!r}")


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
