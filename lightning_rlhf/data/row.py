"""Rows of data, row sources, and the errors of rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from lightning_rlhf.expected_errors import UsageError

Row = Mapping[str, Any]


class TextRow(dict[str, Any]):
    """A row of a format that stores numbers as text, such as CSV."""


@runtime_checkable
class RowSource(Protocol):
    """Protocol of an object that yields rows; set it in YAML by ``class_path``."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield pairs of a location, such as ``file:line``, and a row, or the :class:`BadRow` of an unreadable one."""


class BadRow(UsageError):
    """A row that cannot be used.

    Args:
        why: error message with the row's values.
        kind: message without the row's values, by which such rows are counted; by default ``why``.
        advice: options that make such a row usable; empty if there are no such options.
    """

    def __init__(self, why: str, kind: str | None = None, advice: str = "") -> None:
        super().__init__(why)
        self.kind, self.advice = kind or why, advice


class SkippedRow(BadRow):
    """A row that the configuration skips: it is counted, but is not an error in the data."""
