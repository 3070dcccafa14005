"""Worker processes for user code with a time limit, which can be killed with all that they started."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool
from pebble.pool.base_pool import PoolStatus
from pebble.pool.process import PoolManager

from lightning_rlhf.calls.guard import describe_exit, mark_trainer

MOST_REPEATS = 10  # of a call whose worker processes are ended by something else
_POLL_S = 0.1
_READING_S = 10.0  # a process that ended while it sent a message leaves the reader waiting for the rest


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
        self._running: _Running | None = None
        self._watchers: list[threading.Thread] = []
        self._lock = threading.RLock()
        self.replaced = 0

    @property
    def active(self) -> bool:
        """Whether there are processes that a call will reach; False after an error and before the first call."""
        return self._running is not None and bool(self._running.pool.active)

    def schedule(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Future[Any]:
        """Schedule a call.

        Args:
            function: function of a module that the worker can import.
            *arguments: arguments of the function.
            timeout_s: time limit, seconds; the process of a call that takes longer is killed.

        Raises:
            BrokenProcessPool: the processes ended at once.
            OSError: the system starts no further process.
            RuntimeError: processes cannot be started, such as while a script without a main guard is imported.
        """
        with self._lock:
            if self._running is not None and not self.active:
                self._running = None  # its watcher ends it
                self.replaced += 1
            if self._running is None:
                self._running = self._start()
            running = self._running
            try:
                future: Future[Any] = running.pool.schedule(function, args=arguments, timeout=timeout_s)
            except RuntimeError:
                if running.pool.active:
                    raise
                return self.schedule(function, *arguments, timeout_s=timeout_s)  # the error came in between
            running.calls.add(future)
        future.add_done_callback(running.calls.discard)
        return future

    def _start(self) -> _Running:
        """Start processes, and a thread that ends them after an error of the pool."""
        mark_trainer()
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self._size, initializer=self._initialize, initargs=self._arguments, context=context)
        pool._pool_manager = _PoolManager(pool._context, context)
        try:
            if not pool.active:  # the property starts it
                raise BrokenProcessPool("the worker processes ended at once")
        except BaseException:
            pool.stop()
            pool.join()
            raise
        running = _Running(pool)
        watcher = threading.Thread(target=self._watch, args=(running,), daemon=True)
        watcher.start()
        self._watchers = [each for each in self._watchers if each.is_alive()] + [watcher]
        return running

    def _watch(self, running: _Running) -> None:
        """End a pool after an error or :meth:`stop`, and after an error fail the calls that it has lost.

        Pebble fails the calls that it has given to a process; those in its queue would wait for ever.
        """
        while running.pool.active:
            running.stopped.wait(_POLL_S)
        running.pool.stop()
        running.pool.join()
        with self._lock:  # until now a call may be added
            calls = [] if running.stopped.is_set() else list(running.calls)
        for call in calls:
            if not call.done():
                call.set_exception(BrokenProcessPool("the pool had an error before the call began"))

    def stop(self) -> None:
        """Kill the processes, without waiting for their end."""
        with self._lock:
            if self._running is not None:
                self._running.stopped.set()
                self._running.pool.stop()

    def close(self) -> None:
        """Kill the processes and all that they started."""
        self.stop()
        with self._lock:
            self._running = None
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.join()


@dataclass
class _Running:
    """A started pool.

    Args:
        calls: calls that are not done.
        stopped: set when it is ended on purpose; nothing waits for its calls then.
    """

    pool: ProcessPool
    calls: set[Future[Any]] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)


class _PoolManager(PoolManager):
    """Pebble's manager, which reads all that a process sent before it decides which call ended the process.

    Pebble reads messages in another thread than the one that notices the end of a process. While that thread is late,
    for example because it runs the callbacks of another call, a call that ended its process looks like one that never
    began: it would have no exit code, and :class:`ProcessHost` would repeat it.

    Its threads may still read when :meth:`stop` closes what they read from. That is no error of the calls: their
    callbacks would start new processes.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reads = 0

    def process_next_message(self, timeout: float) -> None:
        """Read one message, if there is one, and handle it."""
        super().process_next_message(timeout)
        self._reads += 1

    def handle_broken_pool(self, error: BrokenProcessPool) -> None:
        """Fail the calls, unless the pool was stopped."""
        if self.context.status != PoolStatus.STOPPED:
            super().handle_broken_pool(error)

    def handle_worker_expiration(self, expiration: tuple[int, int]) -> None:
        """Decide which call ended a process."""
        self._finish_reading()
        super().handle_worker_expiration(expiration)

    def _finish_reading(self) -> None:
        end = time.monotonic() + _READING_S
        last: int | None = None  # number of the read that received the last message, or of one after it
        while self.context.alive and time.monotonic() < end:
            if self.worker_manager.pool_channel.poll(0):
                last = None
            elif last is None:
                last = self._reads
            elif self._reads > last:
                return
            time.sleep(0.001)
