"""The options that a file or a script of another trainer sets: which of them were carried over, and which were not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_rlhf.extras.migration.parts import Counterpart


class GivenOptions:
    """Options with the defaults of their program.

    An option that is read by :meth:`carry` counts as carried over, unless :meth:`leave` lists it, before or after.

    Args:
        given: options that are set, without those that set nothing.
        defaults: values of options that are not set; one that is set to its default is not listed.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.defaults = dict(defaults)
        self.values = {**defaults, **given}
        self.notes: list[str] = []
        self._used: set[str] = set()
        self._left: dict[str, str] = {}  # with the reasons

    def carry(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, which is carried over."""
        self._used.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def is_set(self, name: str) -> bool:
        """Return whether an option is given, with another value than its default; without any, the default is False."""
        value = self.given.get(name, self.defaults.get(name, False))
        return bool(value != self.defaults[name]) if name in self.defaults else value is not False

    def settle(self, *names: str) -> None:
        """Count options as carried over whose values need nothing here."""
        self._used.update(names)

    def leave(self, name: str, reason: str = "") -> None:
        """List an option, also if it is read, with the reason; that of the table is the default."""
        self._left[name] = reason

    def note(self, text: str) -> None:
        """List what is not the value of one option that was left."""
        self.notes.append(text)

    def left(
        self, counterpart: Callable[[str], Counterpart | None], program: str, known: Iterable[str] = ()
    ) -> list[str]:
        """Return the notes, and a line for each option that was given and not carried over.

        Args:
            counterpart: what an option is here.
            program: name of the program and its release, for options that it does not have.
            known: names of its options, of which the nearest is shown for a misspelt one.
        """
        lines = list(self.notes)
        for name, value in self.given.items():
            entry = counterpart(name)
            needs_none = entry is not None and not entry.option and not entry.is_missing
            is_settled = name not in self._left and (name in self._used or needs_none)
            if is_settled or (entry is not None and not self.is_set(name)):
                continue
            reason = self._left.get(name) or (entry.sentence() if entry else _unknown(name, program, known))
            lines.append(f"{name}: {value!r:.80} ({reason})")
        return lines


def _unknown(name: str, program: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.88)
    return f"{program} has no such option" + (f"; did you mean {near[0]}?" if near else "")
