"""Environments of conversations that have begun, and the order of their calls; without torch, for worker processes."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_rlhf.calls.private import private
from lightning_rlhf.calls.references import arguments_of
from lightning_rlhf.environments.host import Call, Fault, Spec
from lightning_rlhf.environments.protocol import InvalidReplyError, Reply, Turn, as_reply
from lightning_rlhf.expected_errors import RunError

_LARGEST_TRACE = 20_000  # characters
_Result = TypeVar("_Result")
# Calls of user code in their order: each result that must be awaited is yielded, and its value is sent back.
Steps = Generator[Awaitable[Any], Any, _Result]


@dataclass
class _Live:
    environment: Any
    turns_seen: int = 0


class LiveEnvironments:
    """Environments of the conversations that a process or an event loop holds.

    Its methods return :data:`Steps`, so that one order of calls serves ``async`` environments, in an event loop that
    awaits them, and all others, which :func:`run_steps` calls in the current thread.

    Args:
        spec: environment of the run.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._live: dict[str, _Live] = {}

    @property
    def keys(self) -> list[str]:
        """Conversations whose environments are not closed."""
        return list(self._live)

    def advance(self, call: Call) -> Steps[Reply | Fault]:
        """Return the reply to the last turn.

        An environment that is not held, or has seen other turns, is made again and sees the earlier turns again.
        """
        if call.base_url:
            return as_reply((yield from _call(self._spec.make(), "run", call.run_arguments)), "run")
        live = self._live.get(call.key)
        if live is None or live.turns_seen != call.seen:
            yield from self.release(call.key)
            live = self._live[call.key] = _Live(self._spec.make())
            reply = yield from _reset(live, call)
            if call.seen < 0:
                return reply
            if (fault := (yield from _replay(live, call, reply))) is not None:
                return fault
        if call.stop:
            return (yield from _finish(live, call))
        return (yield from _step(live, call.turns[-1]))

    def release(self, key: str) -> Steps[None]:
        """Close the environment of a conversation; errors are printed, because nothing depends on it any more."""
        live = self._live.pop(key, None)
        if live is not None and hasattr(live.environment, "close"):
            try:
                yield from _call(live.environment, "close", {})
            except (asyncio.CancelledError, GeneratorExit):  # of the task that runs these steps
                raise
            except BaseException as error:
                print(f"an environment's close() raised {type(error).__name__}: {error}", file=sys.stderr)


def _reset(live: _Live, call: Call) -> Steps[Reply]:
    if not hasattr(live.environment, "reset"):
        return Reply()
    return as_reply(
        (yield from _call(live.environment, "reset", {"row": private(call.row), "seed": call.seed})), "reset"
    )


def _replay(live: _Live, call: Call, reply: Reply) -> Steps[Fault | None]:
    """Repeat the turns that were seen before this call; a reply other than that of the first time is a fault.

    Args:
        live: environment after its ``reset``.
        reply: reply to ``reset``.
    """
    for number, digest in enumerate(call.replies):
        if digest_of(reply) != digest:
            return Fault(
                "replay",
                "gave another reply when a conversation was repeated: its replies must depend only on the row, the "
                "seed and the turns",
            )
        if number < call.seen:
            reply = yield from _step(live, call.turns[number])
    return None


def _step(live: _Live, turn: Turn) -> Steps[Reply]:
    turn = copy.deepcopy(turn)
    arguments = {"turn": turn, "text": turn.text, "calls": turn.calls}
    reply = as_reply((yield from _call(live.environment, "step", arguments)), "step")
    live.turns_seen += 1
    return reply


def _finish(live: _Live, call: Call) -> Steps[Reply]:
    if not hasattr(live.environment, "finish"):
        return Reply()
    return as_reply((yield from _call(live.environment, "finish", call.finish_arguments)), "finish")


def _call(environment: Any, name: str, offered: Mapping[str, Any]) -> Steps[Any]:
    """Call a method of an environment with the arguments that it has."""
    method = getattr(environment, name)
    try:
        result = method(**arguments_of(method, offered))
    except StopIteration as error:  # which would end these steps
        raise RunError("StopIteration") from error
    if inspect.isawaitable(result):
        return (yield result)
    return result


def run_steps(steps: Steps[_Result]) -> _Result:
    """Run steps in this thread; awaitable results run in an event loop of the thread."""
    try:
        awaitable = next(steps)
        while True:
            try:
                value = _thread_loop().run_until_complete(awaitable)
            except BaseException as error:
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(value)
    except StopIteration as end:
        result: _Result = end.value
        return result


class _Loop:
    """An event loop that is closed with the last reference to it, such as that of a thread that ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        self.loop.close()


_of_thread = threading.local()


def _thread_loop() -> asyncio.AbstractEventLoop:
    if not hasattr(_of_thread, "loop"):
        _of_thread.loop = _Loop()
    held: _Loop = _of_thread.loop
    return held.loop


def fault_of(error: BaseException) -> Fault:
    """Describe the error of an environment; long texts, which may come from a server, are cut."""
    if isinstance(error, InvalidReplyError):
        return Fault("invalid", str(error))
    trace = "".join(traceback.format_exception(error))
    if len(trace) > _LARGEST_TRACE:
        trace = f"{trace[: _LARGEST_TRACE // 2]}\n...\n{trace[-_LARGEST_TRACE // 2 :]}"
    return Fault("error", f"raised {type(error).__name__}: {error}"[:2000], trace)


def digest_of(reply: Reply) -> str:
    """Return a digest of a reply's messages, reward and end."""
    content = repr((reply.messages, reply.reward, reply.done))
    return hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).hexdigest()
