"""Where environments run: in worker processes with a time limit, in an event loop, or in threads of the trainer."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.calls.references import load_function
from lightning_rlhf.environments import worker
from lightning_rlhf.environments.host import Host
from lightning_rlhf.environments.loop_host import LoopHost
from lightning_rlhf.environments.protocol import Reply
from lightning_rlhf.environments.worker import Call, Fault, Spec
from lightning_rlhf.rewards.executor import DaemonThreads
from lightning_rlhf.rewards.worker import SCAN_SECONDS, describe_exit, worker_context

_REPEATS = 2  # of a call whose worker process was ended by something else


def make_host(spec: Spec, timeout_s: float | None, concurrency: int) -> Host:
    """Return the host for an environment.

    Args:
        spec: environment of the run.
        timeout_s: time limit of a call, seconds; None: no limit, in threads of this process.
        concurrency: largest number of calls at the same time.
    """
    if is_async(spec):
        return LoopHost(spec, timeout_s, concurrency)
    return ThreadHost(spec, concurrency) if timeout_s is None else ProcessHost(spec, timeout_s, concurrency)


def is_async(spec: Spec) -> bool:
    """Return whether the environment's class has an ``async`` method."""
    factory = load_function(spec.factory) if isinstance(spec.factory, str) else spec.factory
    return any(inspect.iscoroutinefunction(getattr(factory, name, None)) for name in ("reset", "step", "run"))


class ThreadHost(Host):
    """Threads of this process, without a time limit."""

    def __init__(self, spec: Spec, concurrency: int) -> None:
        self._spec = spec
        self._threads = DaemonThreads(concurrency, "environments")
        self._keys: set[str] = set()  # conversations whose environments are not closed

    def call(self, call: Call) -> Future[Reply | Fault]:
        """See :meth:`Host.call`."""
        self._keys.add(call.key)
        return self._threads.submit(worker.advance, self._spec, call)

    def release(self, key: str) -> None:
        """See :meth:`Host.release`."""
        self._threads.submit(self._release, key)

    def _release(self, key: str) -> None:
        self._keys.discard(key)
        worker.release(key)

    def close(self) -> None:
        """End the threads after their current calls, and close the environments."""
        self._threads.close()
        for key in list(self._keys):
            self._release(key)


@dataclass
class _Slot:
    """A worker process with some conversations.

    Args:
        pool: pool of this one process, which starts it again when it ends.
        calls: number of unfinished calls.
        ended: number of times that the process was ended.
        answered: whether a process of the slot has answered a call.
    """

    pool: ProcessPool
    calls: int = 0
    ended: int = 0
    answered: bool = False


class ProcessHost(Host):
    """Worker processes, each with the environments of several conversations and one call at a time.

    A call that takes too long is ended with its process. The process's other conversations continue in a new one, where
    their environments are made again and see the same turns.

    Args:
        spec: environment of the run.
        timeout_s: time limit of a call, seconds.
        concurrency: largest number of processes; they start when they are needed.
    """

    def __init__(self, spec: Spec, timeout_s: float, concurrency: int) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._slots: list[_Slot] = []
        self._homes: dict[str, tuple[_Slot, int]] = {}  # slot of each conversation, and `ended` of it at its last call
        self._broken: list[ProcessPool] = []  # replaced pools whose threads are not joined
        self._lock = threading.RLock()

    def call(self, call: Call) -> Future[Reply | Fault]:
        """See :meth:`Host.call`."""
        result: Future[Reply | Fault] = Future()
        self._schedule(call, result, _REPEATS)
        return result

    def _schedule(self, call: Call, result: Future[Reply | Fault], repeats: int) -> None:
        with self._lock:
            slot, ended = self._homes.get(call.key) or (self._slot(), -1)
            try:
                if not slot.pool.active:
                    self._replace_pool(slot)
                replayed = len(call.turns) if ended != slot.ended else 0
                limit = self._timeout_s * (1 + replayed)
                future = slot.pool.schedule(worker.advance, args=(self._spec, call), timeout=limit)
            except (OSError, BrokenProcessPool) as error:  # the system starts no further process
                result.set_result(Fault("died", f"has no worker process: {error}"))
                return
            except RuntimeError as error:  # raised where the result is read, such as for a script that is imported
                result.set_exception(error)
                return
            self._homes[call.key] = slot, slot.ended
            slot.calls += 1
        future.add_done_callback(partial(self._finish, call, slot, result, repeats))

    def _slot(self) -> _Slot:
        """Return an idle slot, a new one while the limit allows, or the one with the fewest conversations."""
        idle = [slot for slot in self._slots if not slot.calls]
        if not idle and len(self._slots) < self._concurrency:
            self._slots.append(_Slot(self._new_pool()))
            return self._slots[-1]
        homes = Counter(id(slot) for slot, _ in self._homes.values())
        return min(idle or self._slots, key=lambda slot: homes[id(slot)])

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(1, initializer=worker.initialize, initargs=(self._spec,), context=worker_context())

    def _replace_pool(self, slot: _Slot) -> None:
        """Replace a pool that is in error, which accepts no further call."""
        self._broken.append(slot.pool)  # not joined here, because a thread of the pool may have called this
        slot.pool = self._new_pool()
        slot.ended += 1

    def _finish(
        self, call: Call, slot: _Slot, result: Future[Reply | Fault], repeats: int, future: Future[Any]
    ) -> None:
        """Set the result of a call whose future is done; an error that this did not handle would be lost."""
        with self._lock:
            slot.calls -= 1
        if future.cancelled():
            result.cancel()
            return
        error = future.exception()
        if error is None:
            slot.answered = True
            result.set_result(future.result())
        elif isinstance(error, BrokenProcessPool):
            if repeats and slot.answered:
                self._schedule(call, result, repeats - 1)
            else:
                result.set_result(_lost_process(slot))
        else:
            result.set_result(self._fault_of(slot, error))

    def _fault_of(self, slot: _Slot, error: BaseException) -> Fault:
        """Describe the error of a call."""
        if isinstance(error, FutureTimeoutError):
            slot.ended += 1
            return Fault("timeout", f"took longer than its timeout_s of {self._timeout_s:g} s")
        if isinstance(error, ProcessExpired):
            slot.ended += 1
            return Fault("died", f"ended its worker process ({describe_exit(error.exitcode)})")
        # For example a reply that cannot be sent between processes.
        return Fault("invalid", f"returned a value that cannot be sent between processes: {error}")

    def end_overdue(self) -> None:
        """End the threads of pools that were replaced; calls are ended by their pools."""
        with self._lock:
            broken, self._broken = self._broken, []
        for pool in broken:
            pool.stop()
            pool.join()

    def release(self, key: str) -> None:
        """See :meth:`Host.release`."""
        with self._lock:
            slot, _ = self._homes.pop(key, (None, 0))
            if slot is not None and slot.pool.active:
                slot.pool.schedule(worker.release, args=(key,), timeout=self._timeout_s)

    def close(self) -> None:
        """Kill the processes and all that they started."""
        self.end_overdue()
        with self._lock:
            slots, self._slots = self._slots, []
            self._homes.clear()
        if slots:
            time.sleep(2 * SCAN_SECONDS)  # until the processes that the last calls started are known
        for slot in slots:
            slot.pool.stop()
        for slot in slots:
            slot.pool.join()


def _lost_process(slot: _Slot) -> Fault:
    """Describe a process that ended without a call, which is repeated unless no process of the slot ever started."""
    if slot.answered:
        return Fault("died", "lost its worker process")
    return Fault(
        "died",
        "has no worker process: the process ended while it started, and its error output is above. In a script, start "
        "the run under if __name__ == '__main__':, because each worker process imports the script",
    )
