"""The protocol of hosts, which run the calls of environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

from lightning_rlhf.environments.protocol import Reply
from lightning_rlhf.environments.worker import Call, Fault


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
