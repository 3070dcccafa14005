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


def without_nested_nulls(row: Row) -> Row:
    """Return a row of Arrow data whose values have no null values in mappings; a column that is null stays."""
    return {name: without_nulls(value) for name, value in row.items()}


def without_nulls(value: Any) -> Any:
    """Return a value whose mappings have no null values at any depth.

    Arrow gives every mapping of a column the keys of all rows, so a null there stands for a key that the row did not
    have; nulls in lists are the row's own.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def has_nulls(value: Any) -> bool:
    """Return whether a mapping within a value has a null value."""
    if isinstance(value, Mapping):
        return any(item is None or has_nulls(item) for item in value.values())
    return isinstance(value, list) and any(map(has_nulls, value))
