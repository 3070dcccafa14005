"""Environments with ``async`` methods, in an event loop of the trainer."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import override

from lightning_rlhf.calls.loop import GRACE_S, EventLoopThread, cancel_other_tasks
from lightning_rlhf.calls.workers import timeout_message
from lightning_rlhf.environments.host import Call, Fault, Host, Spec
from lightning_rlhf.environments.live import LiveEnvironments, Steps, fault_of
from lightning_rlhf.environments.protocol import Reply
from lightning_rlhf.expected_errors import RunError

_Result = TypeVar("_Result")


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

    @override
    def call(self, call: Call) -> Future[Reply | Fault]:
        started = _LoopCall(call, Future())
        self._submit(started)
        return started.result

    def _submit(self, call: _LoopCall) -> None:
        if self._state is None:
            self._state = _LoopState(LiveEnvironments(self._spec), asyncio.Semaphore(self._concurrency))
        with self._lock:
            self._calls[call.call.key] = call
        self._state.thread.submit(self._answer(call, self._state))

    async def _answer(self, call: _LoopCall, state: _LoopState) -> None:
        async with state.slots:
            call.started = time.monotonic()
            advancing = asyncio.ensure_future(_awaited(state.environments.advance(call.call)))
            await asyncio.wait([advancing], timeout=self._timeout_s)
            reply = self._result(advancing)
            self._set_result(call, reply)
            if isinstance(reply, Fault):
                self._begin_release(call.call.key, state)

    def _set_result(self, call: _LoopCall, reply: Reply | Fault) -> None:
        """Set the result of a call, unless another loop has taken it over."""
        with self._lock:
            if self._calls.get(call.call.key) is not call:
                return
            del self._calls[call.call.key]
        call.result.set_result(reply)

    def _result(self, advancing: asyncio.Future[Reply | Fault]) -> Reply | Fault:
        """Return the result of a call, or describe its error; a call that has not ended is cancelled."""
        if not advancing.done():
            advancing.cancel()
            return Fault("timeout", timeout_message(self._timeout_s or 0))
        if advancing.cancelled():
            return Fault("error", "cancelled itself")
        error = advancing.exception()
        if error is None:
            return advancing.result()
        return fault_of((isinstance(error, _ExitError) and error.__cause__) or error)

    def _begin_release(self, key: str, state: _LoopState) -> None:
        closing = asyncio.wait_for(_awaited(state.environments.release(key)), self._timeout_s)
        task = asyncio.ensure_future(asyncio.gather(closing, return_exceptions=True))
        state.releases.add(task)
        task.add_done_callback(state.releases.discard)

    @override
    def release(self, key: str) -> None:
        if self._state is not None:
            self._state.thread.loop.call_soon_threadsafe(self._begin_release, key, self._state)

    def end_overdue(self) -> None:
        """End calls that block the event loop; all others are repeated in a new loop."""
        if self._timeout_s is None or self._state is None:
            return
        overdue = time.monotonic() - self._timeout_s - GRACE_S
        with self._lock:
            calls = list(self._calls.values())
        late = [call for call in calls if call.started is not None and call.started < overdue]
        if not late:
            return
        self._state.thread.close(timeout_s=0)
        self._state = None
        for call in late:
            self._set_result(call, Fault("timeout", f"blocked its event loop for longer than {self._timeout_s:g} s"))
        for call in calls:
            if call not in late and not call.result.done():
                self._submit(_LoopCall(call.call, call.result))

    def close(self) -> None:
        """Cancel the calls, close the environments, and end the loop; wait for it, but not long."""
        state, self._state = self._state, None
        with self._lock:
            self._calls.clear()
        if state is not None:
            ended = state.thread.submit(self._end(state))
            wait([ended], GRACE_S)
            state.thread.close()

    async def _end(self, state: _LoopState) -> None:
        await asyncio.gather(*state.releases)
        await cancel_other_tasks()
        for key in state.environments.keys:
            self._begin_release(key, state)
        await asyncio.gather(*state.releases)


@dataclass
class _LoopState:
    """An event loop with the environments in it.

    Args:
        environments: environments of the conversations.
        slots: semaphore that limits the calls at the same time.
        thread: thread of the event loop.
        releases: tasks that close environments.
    """

    environments: LiveEnvironments
    slots: asyncio.Semaphore
    thread: EventLoopThread = field(default_factory=lambda: EventLoopThread("async environments"))
    releases: set[asyncio.Future[Any]] = field(default_factory=set)


@dataclass(eq=False)
class _LoopCall:
    """A call in an event loop.

    Args:
        result: future of its result.
        started: time of its begin, as of ``time.monotonic()``; None while it waits.
    """

    call: Call
    result: Future[Reply | Fault]
    started: float | None = None


class _ExitError(RunError):
    """Error in place of an exit, which would end the event loop that all conversations share."""


async def _awaited(steps: Steps[_Result]) -> _Result:
    """Run steps in the running event loop, and await their awaitable results."""
    try:
        awaitable = next(steps)
        while True:
            try:
                value = await awaitable
            except BaseException as error:
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(value)
    except StopIteration as end:
        result: _Result = end.value
        return result
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ExitError(str(error)) from error
