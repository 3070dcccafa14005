"""Exception for ending a run early: after Ctrl-C, a scheduler's signal, or at the end of the job's time."""

from __future__ import annotations

import signal


class Interrupted(KeyboardInterrupt):
    """Interrupt of a run, raised where the run's state is consistent, or at once after a second signal.

    Args:
        number: number of the signal.
        reason: short reason for messages; None uses the name of the signal.
    """

    def __init__(self, number: int, reason: str | None = None) -> None:
        self.number = number
        self.reason = reason or f"by {signal_name(number)}"
        super().__init__(self.reason)

    @property
    def exit_code(self) -> int:
        """Exit code as reported by shells, 128 plus the signal's number: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number


def signal_name(number: int) -> str:
    """Return the name of a signal for messages: ``Ctrl-C`` for SIGINT, otherwise, for example, ``SIGTERM``."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
