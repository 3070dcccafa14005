"""Environments of conversations in the process that runs them; see :mod:`lightning_rlhf.environments.hosts`.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_rlhf.calls.references import load_function
from lightning_rlhf.environments.protocol import InvalidReplyError, Reply, Turn, as_reply
from lightning_rlhf.rewards.worker import MAX_OUTPUT, BoundedOutput, initialize_worker

_LARGEST_TRACE = 20_000  # characters
FaultKind = Literal["error", "invalid", "timeout", "died", "replay"]


@dataclass(frozen=True)
class Spec:
    """The environment of a run, as it is sent to worker processes.

    Args:
        factory: class of the environment, or function that returns one, or its reference.
        arguments: keyword arguments of the factory.
    """

    factory: str | Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Return a new environment."""
        factory = load_function(self.factory) if isinstance(self.factory, str) else self.factory
        return factory(**self.arguments)


@dataclass(frozen=True)
class Fault:
    """Failure of an environment.

    Args:
        kind: ``error`` for an exception, ``invalid`` for a value that is not a reply, ``timeout`` for a call that took
            too long, ``died`` for a process that ended, ``replay`` for another reply to the same turns.
        message: description of the failure; follows the environment's name in messages.
        trace: traceback as text; may be empty.
    """

    kind: FaultKind
    message: str
    trace: str = ""


@dataclass(frozen=True)
class Call:
    """One call of an environment: ``reset`` without turns, else ``step`` with the last of them, or ``finish``.

    Args:
        key: identifier of the conversation.
        row: columns of the prompt's row.
        seed: seed of the conversation.
        turns: turns of the policy so far.
        replies: digests of the replies to ``reset`` and to all turns but the last; for ``finish`` to all turns.
        base_url: address of the endpoint, for a call of an agent; empty for a call of an environment.
        api_key: key of the conversation at the endpoint.
        stop: reason of the end, for a call of ``finish``; empty for other calls.
        last: last turn of the conversation, for a call of ``finish``; not among ``turns`` if it was cut.
    """

    key: str
    row: Mapping[str, Any]
    seed: int
    turns: Sequence[Turn] = ()
    replies: Sequence[str] = ()
    base_url: str = ""
    api_key: str = ""
    stop: str = ""
    last: Turn | None = None

    @property
    def seen(self) -> int:
        """Number of turns that the environment has got before this call; -1 before ``reset``."""
        return len(self.turns) if self.stop else len(self.turns) - 1

    @property
    def finish_arguments(self) -> dict[str, Any]:
        """Arguments of ``finish``."""
        return {"stop": self.stop, "turn": self.last, "text": self.last.text if self.last else ""}

    @property
    def run_arguments(self) -> dict[str, Any]:
        """Arguments of ``run`` of an agent."""
        return {"base_url": self.base_url, "api_key": self.api_key, "row": self.row, "seed": self.seed}


@dataclass
class _Live:
    environment: Any
    steps: int = 0  # turns that the environment has seen


_live: dict[str, _Live] = {}  # environments of this process, by conversation


def initialize(spec: Spec) -> None:
    """Prepare a worker process, and import the environment, so that imports do not count as time of the first call."""
    initialize_worker([])
    if isinstance(spec.factory, str):
        with contextlib.suppress(ValueError):  # raised again by the first call
            load_function(spec.factory)


def advance(spec: Spec, call: Call) -> Reply | Fault:
    """Return the reply to the last turn; an environment that this process does not have is made again.

    Its replies to the earlier turns must then be the same as before.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BoundedOutput):
            stream.remaining = MAX_OUTPUT
    try:
        if call.base_url:
            return as_reply(_call(spec.make(), "run", call.run_arguments), "run")
        live = _live.get(call.key)
        if live is None or live.steps != call.seen:
            release(call.key)
            live = _live[call.key] = _Live(spec.make())
            reply = _reset(live, call)
            if call.seen < 0:
                return reply
            for number, digest in enumerate(call.replies):
                if digest_of(reply) != digest:
                    return Fault(
                        "replay",
                        "gave another reply when a conversation was repeated in a new process: its replies must depend "
                        "only on the row, the seed and the turns",
                    )
                if number < call.seen:
                    reply = _step(live, call.turns[number])
        return _finish(live, call) if call.stop else _step(live, call.turns[-1])
    except BaseException as error:  # an environment may raise any class; the signal of Ctrl-C does not reach it
        return fault_of(error)


def fault_of(error: BaseException) -> Fault:
    """Describe the error of an environment; long texts, which may come from a server, are cut."""
    if isinstance(error, InvalidReplyError):
        return Fault("invalid", str(error))
    trace = "".join(traceback.format_exception(error))
    if len(trace) > _LARGEST_TRACE:
        trace = f"{trace[: _LARGEST_TRACE // 2]}\n...\n{trace[-_LARGEST_TRACE // 2 :]}"
    return Fault("error", f"raised {type(error).__name__}: {error}"[:2000], trace)


def release(key: str) -> None:
    """Close the environment of a conversation; errors are ignored, because nothing depends on it any more."""
    live = _live.pop(key, None)
    if live is not None and hasattr(live.environment, "close"):
        try:
            _call(live.environment, "close", {})
        except BaseException as error:
            print(f"an environment's close() raised {type(error).__name__}: {error}", file=sys.stderr)


def _reset(live: _Live, call: Call) -> Reply:
    if not hasattr(live.environment, "reset"):
        return Reply()
    return as_reply(_call(live.environment, "reset", {"row": call.row, "seed": call.seed}), "reset")


def _step(live: _Live, turn: Turn) -> Reply:
    reply = as_reply(_call(live.environment, "step", step_arguments(turn)), "step")
    live.steps += 1
    return reply


def _finish(live: _Live, call: Call) -> Reply:
    if not hasattr(live.environment, "finish"):
        return Reply()
    return as_reply(_call(live.environment, "finish", call.finish_arguments), "finish")


def step_arguments(turn: Turn) -> dict[str, Any]:
    """Return the arguments that ``step`` may have."""
    return {"turn": turn, "text": turn.text, "calls": turn.calls}


def digest_of(reply: Reply) -> str:
    """Return a digest of a reply's messages, reward and end."""
    content = repr((reply.messages, reply.reward, reply.done))
    return hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).hexdigest()


def arguments_of(method: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that a method has; a method with ``**kwargs`` gets all."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = [parameter.name for parameter in parameters]
    if unknown := [p.name for p in parameters if p.default is p.empty and p.name not in offered]:
        raise TypeError(f"{method.__qualname__} needs {unknown[0]!r}, but only {', '.join(offered)} are passed")
    return {name: offered[name] for name in names if name in offered}


def _call(environment: Any, name: str, offered: Mapping[str, Any]) -> Any:
    """Call a method of an environment, in this thread's event loop if it is ``async``."""
    method = getattr(environment, name)
    result = method(**arguments_of(method, offered))
    return _loop().run_until_complete(result) if inspect.isawaitable(result) else result


_loops = threading.local()


def _loop() -> asyncio.AbstractEventLoop:
    if not hasattr(_loops, "loop"):
        _loops.loop = asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = _loops.loop
    return loop
