"""Groups of consecutive ranks whose first rank acts for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError

S = TypeVar("S")
T = TypeVar("T")
_TIMEOUT = timedelta(days=1)  # rollouts have no time limit; dead ranks are detected by their closed connections
_ERRORS = {kind.__name__: kind for kind in (EngineDied, UsageError, RunError, ValueError, RuntimeError)}


def world_size() -> int:
    """Return the number of processes of this run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


class RankGroup:
    """A group of consecutive ranks, the first of which acts for all. Every rank of the run must construct one.

    The ranks communicate over gloo, separately from the trainer, and must call every method in the same order.

    Args:
        ranks: size of the group, a divisor of the number of processes.

    Raises:
        ValueError: the processes cannot be split into groups of that size.
    """

    def __init__(self, ranks: int) -> None:
        world = world_size()
        if world % ranks:
            raise UsageError(f"{ranks} ranks cannot share an engine in a run of {world}: use a divisor of {world}")
        self.ranks = ranks
        self._group: Any = None
        self._index = 0
        self._first = 0
        if ranks > 1:
            self._group = dist.new_subgroups(ranks, backend="gloo", timeout=_TIMEOUT)[0]
            self._index = dist.get_rank(self._group)
            self._first = dist.get_rank() - self._index

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for the others."""
        return self._index == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on the first rank; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.ranks if self.is_first else []
        with self._death_of_rank_as_engine_died():
            dist.gather_object(value, values or None, dst=self._first, group=self._group)
        return values

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first rank; return its result, or raise its error, on all ranks."""
        return self.scatter_from_first(lambda: [action()] * self.ranks)

    def run_on_first_with(self, items: Iterable[S], action: Callable[[Iterator[S]], T]) -> T:
        """Run ``action(items)`` as in :meth:`run_on_first`; every rank exhausts the items, also after an error.

        Args:
            items: iterable with collectives, such as parameters that are gathered from all ranks.
            action: function of the items.
        """
        remaining = iter(items)

        def run() -> T:
            try:
                return action(remaining)
            finally:
                deque(remaining, maxlen=0)

        if not self.is_first:
            deque(remaining, maxlen=0)
        return self.run_on_first(run)

    def scatter_from_first(self, action: Callable[[], list[T]]) -> T:
        """Run ``action`` on the first rank; return one item of its result to each rank, or raise its error on all."""
        if self._group is None:
            return action()[0]
        if not self.is_first:
            return self._receive()
        try:
            results = [("result", value) for value in action()]
        except Exception as error:
            name = type(error).__name__
            message = str(error) if name in _ERRORS else f"{name}: {error}"
            self._send([(name, message)] * self.ranks)
            raise
        self._send(results)
        return results[0][1]

    def _send(self, items: list[Any]) -> None:
        with self._death_of_rank_as_engine_died():
            dist.scatter_object_list([None], items, src=self._first, group=self._group)

    def _receive(self) -> Any:
        received: list[Any] = [None]
        with self._death_of_rank_as_engine_died():
            dist.scatter_object_list(received, None, src=self._first, group=self._group)
        kind, content = received[0]
        if kind == "result":
            return content
        raise _ERRORS.get(kind, RunError)(content)

    @contextmanager
    def _death_of_rank_as_engine_died(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            last = self._first + self.ranks - 1
            raise EngineDied(
                f"one of the ranks {self._first} to {last}, which share an engine, has ended: {error}"
            ) from error
