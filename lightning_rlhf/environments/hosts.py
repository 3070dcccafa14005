"""Where environments run: in worker processes with a time limit, in an event loop, or in threads of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.environments import worker
from lightning_rlhf.environments.protocol import InvalidReplyError, Reply, as_reply
from lightning_rlhf.environments.worker import Call, Fault, Spec, arguments_of, digest_of
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.references import load_function
from lightning_rlhf.rewards.executor import DaemonThreads, run_loop
from lightning_rlhf.rewards.worker import SCAN_SECONDS, describe_exit, worker_context

_GRACE_S = 1.0  # an async call that still runs this long after its time limit is assumed to block the event loop
_REPEATS = 2  # of a call whose worker process was ended by something else


class Host(ABC):
    """Runs the calls of environments; one conversation has at most one call at a time."""

    @abstractmethod
    def call(self, call: Call) -> Future[Reply | Fault]:
        """Start a call."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Close the environment of a conversation that has ended, without waiting for it."""

    def end_overdue(self) -> None:  # noqa: B027 (most hosts end their calls themselves)
        """End calls that could not be ended at their time limit; called about once a second."""

    @abstractmethod
    def close(self) -> None:
        """End all calls and processes; the host can be used again."""


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
    """

    pool: ProcessPool
    calls: int = 0
    ended: int = 0


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

    def call(self, call: Call) -> Future[Reply | Fault]:
        """See :meth:`Host.call`."""
        result: Future[Reply | Fault] = Future()
        self._schedule(call, result, _REPEATS)
        return result

    def _schedule(self, call: Call, result: Future[Reply | Fault], repeats: int) -> None:
        with self._lock:
            slot, ended = self._homes.get(call.key) or (self._slot(), -1)
            replayed = len(call.turns) if ended != slot.ended else 0
            self._homes[call.key] = slot, slot.ended
            slot.calls += 1
            limit = self._timeout_s * (1 + replayed)
            future = slot.pool.schedule(worker.advance, args=(self._spec, call), timeout=limit)
        future.add_done_callback(partial(self._finish, call, slot, result, repeats))

    def _slot(self) -> _Slot:
        """Return an idle slot, a new one while the limit allows, or the one with the fewest conversations."""
        idle = [slot for slot in self._slots if not slot.calls]
        if not idle and len(self._slots) < self._concurrency:
            pool = ProcessPool(1, initializer=worker.initialize, initargs=(self._spec,), context=worker_context())
            self._slots.append(_Slot(pool))
            return self._slots[-1]
        homes = Counter(id(slot) for slot, _ in self._homes.values())
        return min(idle or self._slots, key=lambda slot: homes[id(slot)])

    def _finish(
        self, call: Call, slot: _Slot, result: Future[Reply | Fault], repeats: int, future: Future[Any]
    ) -> None:
        with self._lock:
            slot.calls -= 1
        try:
            reply = future.result()
        except CancelledError:
            result.cancel()
            return
        except FutureTimeoutError:
            slot.ended += 1
            reply = Fault("timeout", f"took longer than its timeout_s of {self._timeout_s:g} s")
        except ProcessExpired as error:
            slot.ended += 1
            reply = Fault("died", f"ended its worker process ({describe_exit(error.exitcode)})")
        except BrokenProcessPool:
            slot.ended += 1
            if repeats:
                self._schedule(call, result, repeats - 1)
                return
            reply = Fault("died", "lost its worker process")
        except Exception as error:  # for example a reply that cannot be sent between processes
            reply = Fault("invalid", f"returned a value that cannot be sent between processes: {error}")
        result.set_result(reply)

    def release(self, key: str) -> None:
        """See :meth:`Host.release`."""
        with self._lock:
            slot, _ = self._homes.pop(key, (None, 0))
            if slot is not None and slot.pool.active:
                slot.pool.schedule(worker.release, args=(key,), timeout=self._timeout_s)

    def close(self) -> None:
        """Kill the processes and all that they started."""
        with self._lock:
            slots, self._slots = self._slots, []
            self._homes.clear()
        if slots:
            time.sleep(2 * SCAN_SECONDS)  # until the processes that the last calls started are known
        for slot in slots:
            slot.pool.stop()
        for slot in slots:
            slot.pool.join()


class LoopHost(Host):
    """An event loop for environments with ``async`` methods, which are cancelled at their time limit.

    Args:
        spec: environment of the run.
        timeout_s: time limit of a call, seconds; None: no limit.
        concurrency: largest number of calls at the same time.
    """

    def __init__(self, spec: Spec, timeout_s: float | None, concurrency: int) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._state: _LoopState | None = None
        self._calls: dict[str, _LoopCall] = {}  # unfinished calls, by conversation
        self._lock = threading.Lock()

    def call(self, call: Call) -> Future[Reply | Fault]:
        """See :meth:`Host.call`."""
        own = _LoopCall(call, Future())
        self._submit(own)
        return own.result

    def _submit(self, own: _LoopCall) -> None:
        if self._state is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=run_loop, args=(loop,), name="async environments", daemon=True)
            self._state = _LoopState(loop, thread, asyncio.Semaphore(self._concurrency))
            thread.start()
        state = self._state
        with self._lock:
            self._calls[own.call.key] = own
        state.loop.call_soon_threadsafe(lambda: state.loop.create_task(self._answer(own, state)))

    async def _answer(self, own: _LoopCall, state: _LoopState) -> None:
        async with state.slots:
            own.started = time.monotonic()
            advancing = asyncio.ensure_future(self._advance(own.call, state))
            await asyncio.wait([advancing], timeout=self._timeout_s)
            reply = self._result(advancing)
            self._set_result(own, reply)
            if isinstance(reply, Fault):
                self._begin_release(own.call.key, state)

    def _set_result(self, own: _LoopCall, reply: Reply | Fault) -> None:
        """Set the result of a call, unless another loop has taken it over."""
        with self._lock:
            if self._calls.get(own.call.key) is not own:
                return
            del self._calls[own.call.key]
        own.result.set_result(reply)

    def _result(self, advancing: asyncio.Future[Reply | Fault]) -> Reply | Fault:
        """Return the result of a call, or describe its error; a call that has not ended is cancelled."""
        if not advancing.done():
            advancing.cancel()
            return Fault("timeout", f"took longer than its timeout_s of {self._timeout_s:g} s")
        if advancing.cancelled():
            return Fault("error", "cancelled itself")
        error = advancing.exception()
        if isinstance(error, _ExitError):
            error = error.__cause__
        if isinstance(error, InvalidReplyError):
            return Fault("invalid", str(error))
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            return Fault("error", f"raised {type(error).__name__}: {error}"[:2000], trace)
        return advancing.result()

    async def _advance(self, call: Call, state: _LoopState) -> Reply | Fault:
        if call.base_url:
            return as_reply(await _called(self._spec.make(), "run", call.run_arguments), "run")
        environment, steps = state.live.get(call.key, (None, -1))
        if steps == len(call.turns) - 1 >= 0:
            return await self._step(call, environment, steps, state)
        environment = self._spec.make()
        state.live[call.key] = environment, 0
        reply = Reply()
        if hasattr(environment, "reset"):
            reply = as_reply(await _called(environment, "reset", {"row": call.row, "seed": call.seed}), "reset")
        for number, digest in enumerate(call.replies):
            if digest_of(reply) != digest:
                return Fault("replay", "gave another reply when a conversation was repeated in a new event loop")
            reply = await self._step(call, environment, number, state)
        return reply

    async def _step(self, call: Call, environment: Any, number: int, state: _LoopState) -> Reply:
        turn = call.turns[number]
        offered = {"turn": turn, "text": turn.text, "calls": turn.calls}
        reply = as_reply(await _called(environment, "step", offered), "step")
        state.live[call.key] = environment, number + 1
        return reply

    def _begin_release(self, key: str, state: _LoopState) -> None:
        task = state.loop.create_task(self._release(key, state))
        state.releases.add(task)
        task.add_done_callback(state.releases.discard)

    async def _release(self, key: str, state: _LoopState) -> None:
        environment, _ = state.live.pop(key, (None, 0))
        if hasattr(environment, "close"):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(_called(environment, "close", {}), self._timeout_s)

    def release(self, key: str) -> None:
        """See :meth:`Host.release`."""
        state = self._state
        if state is not None:
            state.loop.call_soon_threadsafe(self._begin_release, key, state)

    def end_overdue(self) -> None:
        """End calls that block the event loop; all others are repeated in a new loop."""
        if self._timeout_s is None or self._state is None:
            return
        overdue = time.monotonic() - self._timeout_s - _GRACE_S
        with self._lock:
            calls = list(self._calls.values())
        late = [own for own in calls if own.started is not None and own.started < overdue]
        if not late:
            return
        self._state.loop.call_soon_threadsafe(self._state.loop.stop)  # when it is no longer blocked
        self._state = None
        for own in late:
            self._set_result(own, Fault("timeout", f"blocked its event loop for longer than {self._timeout_s:g} s"))
        for own in calls:
            if own not in late and not own.result.done():
                self._submit(_LoopCall(own.call, own.result))

    def close(self) -> None:
        """Cancel the calls, close the environments, and end the loop; wait for it, but not long."""
        state, self._state = self._state, None
        with self._lock:
            self._calls.clear()
        if state is not None:
            state.loop.call_soon_threadsafe(lambda: state.loop.create_task(self._end(state)))
            state.thread.join(_GRACE_S)

    async def _end(self, state: _LoopState) -> None:
        await asyncio.gather(*state.releases)
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for key in list(state.live):
            self._begin_release(key, state)
        await asyncio.gather(*state.releases)
        state.loop.stop()


@dataclass
class _LoopState:
    """An event loop with the environments in it.

    Args:
        loop: event loop.
        thread: thread that runs it.
        slots: semaphore that limits the calls at the same time.
        live: environment of each conversation, and the number of turns that it has seen.
        releases: tasks that close environments.
    """

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    slots: asyncio.Semaphore
    live: dict[str, tuple[Any, int]] = field(default_factory=dict)
    releases: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(eq=False)
class _LoopCall:
    """A call in an event loop.

    Args:
        call: the call.
        result: future of its result.
        started: time of its begin, as of ``time.monotonic()``; None while it waits.
    """

    call: Call
    result: Future[Reply | Fault]
    started: float | None = None


class _ExitError(RunError):
    """Error in place of an exit, which would end the event loop that all conversations share."""


async def _called(environment: Any, name: str, offered: dict[str, Any]) -> Any:
    method = getattr(environment, name)
    try:
        result = method(**arguments_of(method, offered))
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ExitError(str(error)) from error
