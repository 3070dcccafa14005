"""What the processes of a run tell each other in plain values, under any strategy; one alone tells itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def several() -> bool:
    """Whether there are processes to talk to."""
    return dist.is_available() and dist.is_initialized()


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
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def together(work: Callable[[], T]) -> T:
    """Do what may fail on one rank only; what fails on any rank is raised on all, so that nobody waits. All ranks.

    Args:
        work: raises OSError or ValueError, or returns this rank's result.

    Raises:
        OSError, ValueError: of the first rank that failed.
    """
    failure: OSError | ValueError | None = None
    try:
        result = work()
    except (OSError, ValueError) as error:
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
