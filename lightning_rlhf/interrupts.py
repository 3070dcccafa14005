"""The request to end a run before it is done: by Ctrl-C, by a scheduler's signal, or because the job's time is over."""

from __future__ import annotations

import signal


class Interrupted(KeyboardInterrupt):
    """Ends a run at a point where its state is whole, or at once where it is asked for a second time.

    Args:
        number: of the signal.
        reason: why, in a few words; None names the signal.
    """

    def __init__(self, number: int, reason: str | None = None) -> None:
        self.number = number
        self.reason = reason or f"by {signal_name(number)}"
        super().__init__(self.reason)

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells report it: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number


def signal_name(number: int) -> str:
    """A signal's name as people know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
