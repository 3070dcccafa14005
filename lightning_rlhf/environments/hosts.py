"""Where environments run: in worker processes with a time limit, in an event loop, or in threads of the trainer.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_rlhf.calls.guard import SCAN_SECONDS, begin_call, prepare_worker
from lightning_rlhf.calls.references import as_function, load_function
from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.calls.workers import MOST_REPEATS, WorkerPool, lost_call
from lightning_rlhf.environments.host import Call, Fault, Host, Spec
from lightning_rlhf.environments.live import LiveEnvironments, fault_of, run_steps
from lightning_rlhf.environments.loop_host import LoopHost
from lightning_rlhf.environments.protocol import Reply

_REPEATS = 3  # of a call whose worker process was killed
_held: list[LiveEnvironments] = []  # environments of this worker process


def make_host(spec: Spec, timeout_s: float | None, concurrency: int) -> Host:
    """Return the host for an environment.

    Args:
        spec: environment of the run.
        timeout_s: time limit of a call, seconds; None: no limit, in threads of this process.
        concurrency: largest number of calls at the same time.
    """
    if is_async(spec):
        return LoopHost(spec, timeout_s, concurrency)
    if timeout_s is None:
        return ThreadHost(spec, concurrency)
    return ProcessHost(spec, timeout_s, concurrency)


def is_async(spec: Spec) -> bool:
    """Return whether ``reset``, ``step`` or ``run`` of the environment's class is ``async``."""
    factory = as_function(spec.factory)
    return any(inspect.iscoroutinefunction(getattr(factory, name, None)) for name in ("reset", "step", "run"))


class ThreadHost(Host):
    """Threads of this process, without a time limit."""

    def __init__(self, spec: Spec, concurrency: int) -> None:
        self._threads = DaemonThreads(concurrency, "environments")
        self._environments = LiveEnvironments(spec)

    @override
    def call(self, call: Call) -> Future[Reply | Fault]:
        return self._threads.submit(_advance, self._environments, call)

    @override
    def release(self, key: str) -> None:
        self._threads.submit(lambda: run_steps(self._environments.release(key)))

    def close(self) -> None:
        """End the threads after their current calls, and close the environments."""
        self._threads.close()
        for key in self._environments.keys:
            with contextlib.suppress(asyncio.CancelledError):  # raised by an environment
                run_steps(self._environments.release(key))


@dataclass
class _Slot:
    """A worker process with some conversations.

    Args:
        workers: pool of this one process, which starts it again when it ends.
        calls: number of unfinished calls.
        killed: number of times that a call ended the process.
    """

    workers: WorkerPool
    calls: int = 0
    killed: int = 0

    @property
    def ended(self) -> int:
        """Number of times that the process was ended."""
        return self.killed + self.workers.replaced


@dataclass(frozen=True)
class _Attempt:
    """An attempt at a call.

    Args:
        slot: slot of its process.
        repeats: number of times that the call is repeated if it is killed.
        starts: number of times that the call is repeated if its process ends otherwise.
        ended: ``ended`` of the slot when the limit was computed; None if the limit is that of a new process.
    """

    slot: _Slot
    repeats: int
    starts: int
    ended: int | None


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
        self._lock = threading.RLock()
        self._answered = False  # whether any process has answered a call, so that processes can start

    @override
    def call(self, call: Call) -> Future[Reply | Fault]:
        result: Future[Reply | Fault] = Future()
        self._schedule(call, result, _REPEATS, MOST_REPEATS)
        return result

    def _schedule(self, call: Call, result: Future[Reply | Fault], repeats: int, starts: int) -> None:
        with self._lock:
            slot, ended = self._homes.get(call.key) or (self._slot(), -1)
            replays = 0
            if ended != slot.ended or not slot.workers.active:
                replays = len(call.turns)
            limit = self._timeout_s * (1 + replays)
            try:
                future = slot.workers.schedule(_advance_here, call, timeout_s=limit)
            except (OSError, BrokenProcessPool) as error:  # the system starts no further process
                result.set_result(Fault("died", f"has no worker process: {error}"))
                return
            except RuntimeError as error:  # raised where the result is read, such as for a script that is imported
                result.set_exception(error)
                return
            self._homes[call.key] = slot, slot.ended
            slot.calls += 1
            attempt = _Attempt(slot, repeats, starts, None if replays else slot.ended)
        future.add_done_callback(partial(self._finish, call, result, attempt))

    def _slot(self) -> _Slot:
        """Return an idle slot, a new one while the limit allows, or the one with the fewest conversations."""
        idle = [slot for slot in self._slots if not slot.calls]
        if not idle and len(self._slots) < self._concurrency:
            self._slots.append(_Slot(WorkerPool(1, _initialize, self._spec)))
            return self._slots[-1]
        homes = Counter(id(slot) for slot, _ in self._homes.values())
        return min(idle or self._slots, key=lambda slot: homes[id(slot)])

    def _finish(self, call: Call, result: Future[Reply | Fault], attempt: _Attempt, future: Future[Any]) -> None:
        """Set the result of a call whose future is done; an error that this did not handle would be lost.

        Args:
            result: future of its result.
            attempt: attempt whose future is done.
        """
        slot = attempt.slot
        with self._lock:
            slot.calls -= 1
        if future.cancelled():
            result.cancel()
            return
        error = future.exception()
        if error is None:
            self._answered = True
            result.set_result(future.result())
            return
        lost = lost_call(error, self._timeout_s)
        if lost is None:  # for example a reply that cannot be sent between processes
            result.set_result(Fault("invalid", f"returned a value that cannot be sent between processes: {error}"))
            return
        # A process that began while the call waited for it had to repeat the earlier turns within the limit of one.
        repeated_turns = call.turns and attempt.ended not in (None, slot.ended)
        slot.killed += lost.kind != "broken"
        if lost.kind == "timeout" and repeated_turns:
            self._schedule(call, result, attempt.repeats, attempt.starts)
        elif lost.kind == "killed" and attempt.repeats:
            self._schedule(call, result, attempt.repeats - 1, attempt.starts)
        elif lost.kind == "broken" and attempt.starts and self._answered:
            self._schedule(call, result, attempt.repeats, attempt.starts - 1)
        elif lost.kind == "broken":
            result.set_result(_lost_process(self._answered))
        else:
            result.set_result(Fault("timeout" if lost.kind == "timeout" else "died", lost.message))

    @override
    def release(self, key: str) -> None:
        with self._lock:
            slot, _ = self._homes.pop(key, (None, 0))
            if slot is not None and slot.workers.active:
                slot.workers.schedule(_release_here, key, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Kill the processes and all that they started."""
        with self._lock:
            slots, self._slots = self._slots, []
            self._homes.clear()
        if slots:
            time.sleep(2 * SCAN_SECONDS)  # until the processes that the last calls started are known
        for slot in slots:
            slot.workers.stop()
        for slot in slots:
            slot.workers.close()


def _lost_process(starts: bool) -> Fault:
    """Describe the loss of a call whose worker process was not ended by the call itself.

    Args:
        starts: whether worker processes have started and answered calls.
    """
    if starts:
        return Fault("died", "lost its worker process")
    return Fault(
        "died",
        "has no worker process: the process ended while it started, and its error output is above. In a script, start "
        "the run under if __name__ == '__main__':, because each worker process imports the script",
    )


def _advance(environments: LiveEnvironments, call: Call) -> Reply | Fault:
    try:
        return run_steps(environments.advance(call))
    except BaseException as error:  # an environment may raise any class; the signal of Ctrl-C does not reach it
        return fault_of(error)


# -- the following runs in a worker process ------------------------------------------------------------------


def _initialize(spec: Spec) -> None:
    """Prepare a worker process, and import the environment, so that imports do not count as time of the first call."""
    prepare_worker()
    _held.append(LiveEnvironments(spec))
    if isinstance(spec.factory, str):
        with contextlib.suppress(ValueError):  # raised again by the first call
            load_function(spec.factory)


def _advance_here(call: Call) -> Reply | Fault:
    begin_call()
    return _advance(_held[0], call)


def _release_here(key: str) -> None:
    run_steps(_held[0].release(key))
