"""Exchange of Python objects between the processes of a run, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_GROUP: ContextVar[Any] = ContextVar("process group", default=None)


def is_distributed() -> bool:
    """Return whether a process group is initialised."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def over(group: Any) -> Iterator[None]:
    """Exchange objects over another process group inside a ``with`` block, in this thread only.

    A second thread needs a separate group, because all ranks must call the collectives of a group in the same order.

    Args:
        group: process group of all ranks; None is the default one.
    """
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def group() -> Any:
    """Return the process group in use; None is the default one."""
    return _GROUP.get()


def rank() -> int:
    """Return the rank of this process, in [0, world_size())."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def from_all_ranks(value: T) -> list[T]:
    """Return the value of every rank, in the order of the ranks. All ranks.

    Args:
        value: value of this rank, which can be pickled.
    """
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value, group=group())
    return values  # type: ignore[return-value]


def raise_on_all_ranks(work: Callable[[], T]) -> T:
    """Call a function on all ranks; if it fails on any rank, raise that error on all, to avoid a deadlock. All ranks.

    Args:
        work: function that returns this rank's result; only the errors below are passed to other ranks.

    Raises:
        OSError, ValueError, FloatingPointError: the error of the first rank that failed.
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
    """Call a function on rank 0; return its result, or raise its error, on all ranks. All ranks.

    Args:
        work: function as in :func:`raise_on_all_ranks`; its result can be pickled.
    """
    return from_all_ranks(raise_on_all_ranks(lambda: work() if rank() == 0 else None))[0]  # type: ignore[return-value]
