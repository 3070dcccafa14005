"""What a row of data is, and what is raised of one that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

Row = Mapping[str, Any]


class TextRow(dict[str, Any]):
    """A row of a format that knows nothing but text, such as CSV: a number comes as its digits."""


@runtime_checkable
class RowSource(Protocol):
    """Anything that makes rows: give it in YAML by ``class_path``."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """(where the row stands, the row or the :class:`BadRow` it is); where is ``file:line`` or the like."""


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        why: in words, with what this row holds.
        kind: the same for all such rows, under which they are counted; by default ``why``.
        advice: which options make such a row usable, where some do.
    """

    def __init__(self, why: str, kind: str | None = None, advice: str = "") -> None:
        super().__init__(why)
        self.kind, self.advice = kind or why, advice


class LeftOut(BadRow):
    """A row that the configuration leaves out on purpose: counted, and no fault of the data."""
