"""Rows of data: where they come from, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

Row = Mapping[str, Any]
OnBadRow = Literal["error", "skip"]
_Item = TypeVar("_Item")
_SHOWN = 5
_FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@runtime_checkable
class RowSource(Protocol):
    """Anything that makes rows: give it in YAML by ``class_path``."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """(where the row stands, the row); where is ``file:line`` or the like."""


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        why: in words, with what this row holds.
        kind: the same for all such rows, under which they are counted; by default ``why``.
    """

    def __init__(self, why: str, kind: str | None = None) -> None:
        super().__init__(why)
        self.kind = kind or why


@dataclass
class RowReport:
    """How many rows were read, kept, and dropped for which reason.

    Args:
        name: of the data, for messages.
        kept: rows in use.
        dropped: reason to number of rows.
    """

    name: str
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        read = self.kept + sum(self.dropped.values())
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in self.dropped.most_common())
        return f"{self.name}: {read} rows read, {self.kept} kept{reasons}"


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line.

    Args:
        path: of the file.
    """

    path: str

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Rows with their line numbers; a line that is no JSON object comes as the error that says so."""
        with open(self.path, encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{self.path}:{number}", _parsed(line.rstrip())


@dataclass(frozen=True)
class InMemory:
    """Rows that are already there.

    Args:
        items: the rows.
    """

    items: Sequence[Row]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Rows with their numbers."""
        for number, row in enumerate(self.items):
            yield f"row {number}", row


@dataclass(frozen=True)
class HubDataset:
    """A dataset read by ``datasets``: hub id, or a parquet, CSV or JSON file. Code from the hub is never run.

    Args:
        path: hub id or file.
        name: configuration of the dataset.
        split: which part.
        revision: branch, tag or commit.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Rows with their numbers.

        Raises:
            ValueError: no such dataset, split or configuration; a broken file; or the hub is out of reach.
        """
        import datasets

        kind = _FILE_KINDS.get(Path(self.path).suffix)
        try:
            if kind is not None:
                dataset = datasets.load_dataset(kind, data_files=self.path, split="train")
            else:
                dataset = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            what = "" if kind is not None else f", split {self.split!r}, which is no file and so taken for a hub id"
            reason = str(error.__cause__ or error).strip().split("\n")[0]
            raise ValueError(f"cannot read {self.path!r}{what}: {reason}") from error
        for number, row in enumerate(dataset):
            yield f"{self.path}[{number}]", row


def as_rows(source: str | RowSource) -> RowSource:
    """A bare string is short for a JSONL file, another file that ``datasets`` reads, or a hub id.

    Raises:
        FileNotFoundError: it looks like a path and nothing is there.
    """
    if not isinstance(source, str):
        return source
    if Path(source).is_file() and Path(source).suffix in _FILE_KINDS:
        return JsonLines(source) if source.endswith(".jsonl") else HubDataset(source)
    path = Path(source)
    if path.exists() or path.suffix in _FILE_KINDS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise FileNotFoundError(
            f"no data at {source!r}: expected an existing {', '.join(_FILE_KINDS)} file, or a hub id such as "
            f"'Anthropic/hh-rlhf'"
        )
    return HubDataset(source)


def use_rows(
    source: str | RowSource, name: str, convert: Callable[[Row], _Item], on_bad_row: OnBadRow
) -> tuple[list[_Item], RowReport]:
    """Convert every row, and account for those that cannot be used.

    Args:
        source: of the rows.
        name: of the data, for messages.
        convert: makes an item of a row, or raises :class:`BadRow` saying why it cannot.
        on_bad_row: ``error`` reads everything, then fails naming the first bad rows; ``skip`` leaves them out and
            counts.

    Raises:
        ValueError: bad rows and ``on_bad_row`` is ``error``; or no row is left.
    """
    items: list[_Item] = []
    shown: list[str] = []
    report = RowReport(name)
    for where, row in as_rows(source).rows():
        try:
            if isinstance(row, BadRow):
                raise row
            items.append(convert(row))
            report.kept += 1
        except BadRow as reason:
            report.dropped[reason.kind] += 1
            if len(shown) < _SHOWN:  # a file may hold millions of bad rows
                shown.append(f"\n  {where}: {reason}")
    bad = report.dropped.total()
    if bad and on_bad_row == "error":
        more = f"\n  ... and {bad - len(shown)} more" if bad > len(shown) else ""
        raise ValueError(
            f"{name}: {bad} of {report.kept + bad} rows cannot be used (on_bad_row: skip leaves them out):"
            f"{''.join(shown)}{more}"
        )
    if not items:
        raise ValueError(f"{report}: nothing is left to use")
    return items, report


def text_of(row: Row, column: str) -> str:
    """The text in a column.

    Raises:
        BadRow: the column is missing, empty, or no text.
    """
    if column not in row:
        raise BadRow(f"no column {column!r}, only {sorted(map(str, row))}", f"no column {column!r}")
    value = row[column]
    if not isinstance(value, str):
        found = "null" if value is None else type(value).__name__
        raise BadRow(f"column {column!r} holds {found}, expected text")
    if not value.strip():
        raise BadRow(f"column {column!r} is empty")
    if not is_unicode(value):
        raise BadRow(f"column {column!r} is not valid UTF-8 text")
    return value


def is_unicode(text: str) -> bool:
    """False for a text with lone surrogates (bytes that are no UTF-8, half a pair in JSON); no tokenizer reads it."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _parsed(line: str) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON: {error.msg} at column {error.colno}", "not JSON")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of brackets
        return BadRow(f"not JSON that can be read: {error}", "not JSON")
    return row if isinstance(row, dict) else BadRow(f"a JSON {type(row).__name__}, expected an object", "not an object")
