"""Worker processes for user code with a time limit, which can be killed with all that they started."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.calls.guard import describe_exit, mark_trainer

MOST_STARTS = 10  # of worker processes for one call, after they were ended by something else


@dataclass(frozen=True)
class LostCall:
    """Reason why a call in a worker process has no result of its function.

    Args:
        kind: ``timeout`` for a call that took too long, ``died`` for a call that ended its process, ``killed`` for one
            during which its process received SIGKILL, perhaps for another reason, ``broken`` for a call whose process
            was ended by something else, such as another call.
        message: description; follows the name of the function.
    """

    kind: Literal["timeout", "died", "killed", "broken"]
    message: str


def lost_call(error: BaseException, timeout_s: float | None) -> LostCall | None:
    """Describe the error of a call that was lost; None for any other error, such as one that the function raised.

    Args:
        error: exception of the call's future.
        timeout_s: time limit of the call, seconds.
    """
    if isinstance(error, FutureTimeoutError) and timeout_s is not None:
        return LostCall("timeout", timeout_message(timeout_s))
    if isinstance(error, ProcessExpired):
        kind: Literal["died", "killed"] = "killed" if error.exitcode == -signal.SIGKILL else "died"
        return LostCall(kind, f"ended its worker process ({describe_exit(error.exitcode)})")
    if isinstance(error, BrokenProcessPool):
        return LostCall("broken", "lost its worker process")
    return None


def timeout_message(timeout_s: float) -> str:
    """Describe a call that exceeded its time limit."""
    return f"took longer than its timeout_s of {timeout_s:g} s"


class WorkerPool:
    """A pool of worker processes; started with the first call, and again after an error of the pool or :meth:`close`.

    Args:
        size: largest number of processes.
        initialize: function that each process calls first; it must call
            :func:`~lightning_rlhf.calls.guard.prepare_worker`.
        arguments: arguments of ``initialize``.

    Attributes:
        replaced: number of times that the pool had an error and was replaced by a new one.
    """

    def __init__(self, size: int, initialize: Callable[..., None], *arguments: Any) -> None:
        self._size = size
        self._initialize = initialize
        self._arguments = arguments
        self._pool: ProcessPool | None = None
        self._retired: list[ProcessPool] = []  # pools in error whose threads are not joined
        self.replaced = 0

    @property
    def active(self) -> bool:
        """Whether there are processes that a call will reach; False after an error and before the first call."""
        return self._pool is not None and bool(self._pool.active)

    def schedule(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Future[Any]:
        """Schedule a call.

        Args:
            function: function of a module that the worker can import.
            *arguments: arguments of the function.
            timeout_s: time limit, seconds; the process of a call that takes longer is killed.

        Raises:
            OSError: the system starts no further process.
            RuntimeError: processes cannot be started, such as while a script without a main guard is imported.
        """
        if self._pool is not None and not self.active:
            self._retired.append(self._pool)  # not joined here, because a thread of the pool may have called this
            self._pool = None
            self.replaced += 1
        if self._pool is None:
            mark_trainer()
            self._pool = ProcessPool(
                self._size,
                initializer=self._initialize,
                initargs=self._arguments,
                context=multiprocessing.get_context("spawn"),
            )
        future: Future[Any] = self._pool.schedule(function, args=arguments, timeout=timeout_s)
        return future

    def end_retired(self) -> None:
        """End pools that were replaced; not to be called in a thread of a pool."""
        retired, self._retired = self._retired, []
        for pool in retired:
            pool.stop()
            pool.join()

    def stop(self) -> None:
        """Kill the processes, without waiting for their end."""
        if self._pool is not None:
            self._pool.stop()

    def close(self) -> None:
        """Kill the processes and all that they started."""
        self.stop()
        if self._pool is not None:
            self._pool.join()
            self._pool = None
        self.end_retired()
