"""Environments with ``async`` methods, in an event loop of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.environments.host import Host
from lightning_rlhf.environments.protocol import Reply, as_reply
from lightning_rlhf.environments.worker import Call, Fault, Spec, arguments_of, digest_of, fault_of, step_arguments
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.rewards.executor import run_loop

_GRACE_S = 1.0  # an async call that still runs this long after its time limit is assumed to block the event loop


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
        return advancing.result() if error is None else fault_of(error)

    async def _advance(self, call: Call, state: _LoopState) -> Reply | Fault:
        if call.base_url:
            return as_reply(await _called(self._made(), "run", call.run_arguments), "run")
        environment, steps = state.live.get(call.key, (None, -2))
        if steps != call.seen:
            environment = self._made()
            state.live[call.key] = environment, 0
            reply = Reply()
            if hasattr(environment, "reset"):
                reply = as_reply(await _called(environment, "reset", {"row": call.row, "seed": call.seed}), "reset")
            if call.seen < 0:
                return reply
            for number, digest in enumerate(call.replies):
                if digest_of(reply) != digest:
                    return Fault("replay", "gave another reply when a conversation was repeated in a new event loop")
                if number < call.seen:
                    reply = await self._step(call, environment, number, state)
        if not call.stop:
            return await self._step(call, environment, call.seen, state)
        if not hasattr(environment, "finish"):
            return Reply()
        return as_reply(await _called(environment, "finish", call.finish_arguments), "finish")

    def _made(self) -> Any:
        with _exits_as_errors():
            return self._spec.make()

    async def _step(self, call: Call, environment: Any, number: int, state: _LoopState) -> Reply:
        reply = as_reply(await _called(environment, "step", step_arguments(call.turns[number])), "step")
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


@contextlib.contextmanager
def _exits_as_errors() -> Iterator[None]:
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ExitError(str(error)) from error


async def _called(environment: Any, name: str, offered: dict[str, Any]) -> Any:
    method = getattr(environment, name)
    with _exits_as_errors():
        result = method(**arguments_of(method, offered))
        return await result if inspect.isawaitable(result) else result
