"""Exchange of plain values between the processes of a run, under any strategy; a single process has its own values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_GROUP: ContextVar[Any] = ContextVar("process group", default=None)


def several() -> bool:
    """Whether there are processes to talk to."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def over(group: Any) -> Iterator[None]:
    """Exchange values over another process group while the ``with`` block lasts, in this thread only.

    A thread beside the main one needs a group of its own, because collectives of one group must come in one order.

    Args:
        group: of all ranks; None is the default one.
    """
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def group() -> Any:
    """The process group in use; None is the default one."""
    return _GROUP.get()


def rank() -> int:
    """The number of this process, in [0, world())."""
    return dist.get_rank() if several() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if several() else 1


def from_all_ranks(value: T) -> list[T]:
    """The value of every rank, in their order. All ranks.

    Args:
        value: of this rank; anything that can be pickled.
    """
    if not several():
        return [value]
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value, group=group())
    return values  # type: ignore[return-value]


def together(work: Callable[[], T]) -> T:
    """Do what may fail on one rank only; what fails on any rank is raised on all, so that nobody waits. All ranks.

    Args:
        work: raises OSError, ValueError or FloatingPointError, or returns this rank's result.

    Raises:
        OSError, ValueError, FloatingPointError: of the first rank that failed.
    """
    failure: OSError | ValueError | FloatingPointError | None = None
    try:
        result = work()
    except (OSError, ValueError, FloatingPointError) as error:
        failure = error
    failures = [error for error in from_all_ranks(failure) if error is not None]
    if failures:
        raise failures[0] from None
    return result


def on_first_rank(work: Callable[[], T]) -> T:
    """Do something on rank 0 and tell all ranks the result; a failure is raised on all. All ranks.

    Args:
        work: as for :func:`together`.
    """
    return from_all_ranks(together(lambda: work() if rank() == 0 else None))[0]  # type: ignore[return-value]
