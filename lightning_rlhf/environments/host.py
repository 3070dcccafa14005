"""Calls of environments, and the protocol of hosts, which run them; without torch, for worker processes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_rlhf.calls.private import private
from lightning_rlhf.calls.references import as_function
from lightning_rlhf.environments.protocol import Reply, Turn

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
        factory = as_function(self.factory)
        return factory(**private(dict(self.arguments), objects=False))


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
        return {"stop": self.stop, "turn": copy.deepcopy(self.last), "text": self.last.text if self.last else ""}

    @property
    def run_arguments(self) -> dict[str, Any]:
        """Arguments of ``run`` of an agent."""
        return {"base_url": self.base_url, "api_key": self.api_key, "row": private(self.row), "seed": self.seed}


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
