"""The request to end a run early: by Ctrl-C, by a scheduler's signal, or at the end of the job's time."""

from __future__ import annotations

import signal


class Interrupted(KeyboardInterrupt):
    """Ends a run at a point where its state is consistent, or at once at the second request.

    Args:
        number: number of the signal.
        reason: reason in a few words; None names the signal.
    """

    def __init__(self, number: int, reason: str | None = None) -> None:
        self.number = number
        self.reason = reason or f"by {signal_name(number)}"
        super().__init__(self.reason)

    @property
    def exit_code(self) -> int:
        """Exit code 128 plus the signal's number, as shells report it: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number


def signal_name(number: int) -> str:
    """Return the name of a signal for users: ``Ctrl-C`` or, for example, ``SIGTERM``."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
