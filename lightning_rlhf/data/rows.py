"""Row sources, and the conversion of rows with a report of bad rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from lightning_rlhf.data.columns import AmbiguousColumns
from lightning_rlhf.data.columns import text_of as text_of
from lightning_rlhf.data.files import FILE_KINDS, Files, expand, is_url, looks_like_a_path
from lightning_rlhf.data.row import BadRow as BadRow
from lightning_rlhf.data.row import Row as Row
from lightning_rlhf.data.row import RowSource as RowSource
from lightning_rlhf.data.row import SkippedRow, without_nested_nulls
from lightning_rlhf.expected_errors import MissingFileError, UsageError, counted
from lightning_rlhf.paths import describe_missing_path, hub_error_message

OnBadRow = Literal["error", "skip"]
# With a path among the types, jsonargparse treats a file name as a value and does not read it as configuration. Path
# comes last: otherwise jsonargparse would serialize the other types by their Python representation.
Source = str | RowSource | list[str | RowSource | Path] | Path
_Item = TypeVar("_Item")
_MAX_SHOWN = 5
_LOCATION = re.compile(r"(.*?)(:\d+|\[\d+\])")


@dataclass
class RowReport:
    """Counts of used and dropped rows, with the reasons.

    Args:
        name: name of the data in messages.
        used: number of used rows.
        dropped: number of dropped rows for each reason.
        cut: number of rows for each kind of cut; these rows are used.
        column_mappings: number of used rows for each mapping of columns to fields.
        has_messages: whether a used row has messages.
        unknown: number of occurrences of each part of the used texts that the tokenizer does not know.
        unknown_rows: number of rows with such parts.
        notes: number of used rows for each sentence about what was left out of their texts.
        unread: number of used rows for each column with a value that no field reads.
        bad: number of dropped rows with an error in the data; the configuration skips the others.
        first_bad: location and error of the first bad rows, and of the first bad row for each further reason.
        advice: options that make bad rows usable, without repetition.
        locations: location of each used row, such as ``file:line``.
        location: location of the row that is converted.
    """

    name: str
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    column_mappings: Counter[str] = field(default_factory=Counter)
    has_messages: bool = False
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_rows: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    locations: list[str] = field(default_factory=list, repr=False)
    location: str = field(default="", repr=False)

    def drop(self, location: str, reason: BadRow) -> None:
        """Count a row that is not used."""
        self.dropped[reason.kind] += 1
        if isinstance(reason, SkippedRow):
            return
        self.bad += 1
        if reason.advice and reason.advice not in self.advice:
            self.advice.append(reason.advice)
        is_new_reason = self.dropped[reason.kind] == 1 and len(self.first_bad) < 2 * _MAX_SHOWN
        if len(self.first_bad) < _MAX_SHOWN or is_new_reason:  # a file can contain millions of bad rows
            self.first_bad.append(f"{location}: {reason}")

    def describe_unknown(self) -> str:
        """Describe the parts of the texts that the tokenizer does not know; empty if it knows all."""
        if not self.unknown:
            return ""
        shown = ", ".join(f"{part!r} {n}" for part, n in self.unknown.most_common(_MAX_SHOWN))
        more = ""
        if len(self.unknown) > _MAX_SHOWN:
            more = f" and {len(self.unknown) - _MAX_SHOWN} others"
        rows = f"{self.unknown_rows} of {self.used} rows"
        return f"the tokenizer does not know {self.unknown.total()} parts of the texts in {rows}: {shown}{more}"

    def describe_notes(self) -> list[str]:
        """Return each sentence about what was left out of texts, with its number of rows."""
        return [f"{sentence} ({number} of {self.used} rows)" for sentence, number in self.notes.most_common()]

    def error_message(self) -> str:
        """Return the message of the error that bad rows raise."""
        more = []
        if self.bad > len(self.first_bad):
            more = [f"... and {self.bad - len(self.first_bad)} more"]
        rows = self.used + self.dropped.total()
        heading = f"{self.name}: {self.bad} of {rows} rows cannot be used"
        remedy = " (set on_bad_row: skip to skip them)" if self.bad < rows else ""
        return "\n  ".join([f"{heading}{remedy}:", *self.first_bad, *more, *self.advice])

    def __str__(self) -> str:
        read = self.used + sum(self.dropped.values())
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in self.dropped.most_common())
        cuts = "".join(f"; cut {n}: {cut}" for cut, n in self.cut.most_common())
        return f"{self.name}: {counted(read, 'row')} read, {self.used} kept{reasons}{cuts}"


@dataclass(frozen=True)
class InMemory:
    """Rows in memory.

    Args:
        items: sequence of rows.
    """

    items: Sequence[Row]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows with their numbers."""
        # Rows of a data set of the hub are read from Arrow.
        is_arrow = type(self.items).__module__.startswith("datasets.")
        for number, row in enumerate(self.items):
            yield f"row {number}", without_nested_nulls(row) if is_arrow else row


@dataclass(frozen=True)
class ConcatenatedRows:
    """Rows of several sources in sequence.

    Args:
        sources: row sources, at least one.
    """

    sources: Sequence[RowSource]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of each source."""
        for source in self.sources:
            yield from source.rows()


@dataclass(frozen=True)
class HubDataset:
    """Reads a dataset of the Hugging Face hub with ``datasets``. No code from the hub is run.

    Args:
        path: hub id.
        name: configuration of the dataset.
        split: part to read, such as ``train`` or ``test``.
        revision: branch, tag or commit.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows with their numbers.

        Raises:
            ValueError: the dataset, split or configuration does not exist, a file is broken, or the hub is unreachable.
        """
        import datasets

        try:
            dataset = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            if isinstance(error, OSError):
                reason = hub_error_message(self.path, error)
            else:  # the dataset exists, but the split or configuration does not, or a file is broken
                reason = str(error.__cause__ or error).strip().split("\n")[0]
            failed = UsageError(f"cannot read {self.path!r}, split {self.split!r}, as a dataset of the hub: {reason}")
            raise failed from (None if isinstance(error, OSError) else error)
        for number, row in enumerate(dataset):
            yield f"{self.path}[{number}]", without_nested_nulls(row)


@dataclass(frozen=True)
class SavedDataset:
    """A directory that ``save_to_disk`` of ``datasets`` wrote.

    Args:
        path: directory of one split; of several splits, name one, such as ``saved/train``.
    """

    path: str

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows with their numbers.

        Raises:
            ValueError: the directory has several splits, or its files are damaged.
        """
        import datasets

        directory = Path(self.path).expanduser()
        if (directory / "dataset_dict.json").is_file():
            splits = sorted(path.name for path in directory.iterdir() if is_saved_dataset(str(path)))
            example = "train" if "train" in splits else splits[0]
            raise UsageError(
                f"{self.path!r} has the splits {', '.join(splits)}: name one, such as {self.path}/{example}"
            )
        try:
            dataset = datasets.load_from_disk(str(directory))
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise UsageError(f"cannot read {self.path!r} as a saved data set: {error}") from error
        for number, row in enumerate(dataset):
            yield f"{self.path}[{number}]", without_nested_nulls(row)


def is_saved_dataset(source: str) -> bool:
    """Return whether a path is a directory that ``save_to_disk`` of ``datasets`` wrote."""
    directory = Path(source).expanduser()
    return (directory / "dataset_dict.json").is_file() or (
        (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    )


def folder_of(location: str) -> Path | None:
    """Return the directory of the file in a row's location; None if the row is not in a local file."""
    match = _LOCATION.fullmatch(location)
    if match is None or not Path(match[1]).is_file():
        return None
    return Path(match[1]).parent


def as_rows(source: Source) -> RowSource:
    """Convert a string (files or hub id) or a list of sources, read in sequence, to a row source.

    Raises:
        FileNotFoundError: the source looks like a path, but no data files match.
        ValueError: an empty list, or a directory with files of several splits.
    """
    if isinstance(source, list):
        if not source:
            raise UsageError("the list of data is empty: add at least one file, hub id or row source")
        return ConcatenatedRows([as_rows(part) for part in source])
    if not isinstance(source, str | Path):
        return source
    source = str(source)
    if is_saved_dataset(source):
        return SavedDataset(source)
    if files := expand(source):
        return Files(tuple(files))
    if looks_like_a_path(source):
        raise MissingFileError(
            f"no data at {source!r}: expected an existing {', '.join(FILE_KINDS)} file, a directory or pattern of "
            f"them, a URL such as 'hf://datasets/owner/name/file.parquet', or a hub id such as 'Anthropic/hh-rlhf'; "
            f"{_describe_source(source)}"
        )
    return HubDataset(source)


def _describe_source(source: str) -> str:
    """Explain why a source has no data files."""
    if is_url(source):
        return f"no such file at {source}"
    path = Path(source).expanduser()
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())[:5]
        if names:
            return f"{path.absolute()} has {', '.join(names)}"
        return f"{path.absolute()} is empty"
    if path.is_file():
        return f"{path.absolute()} exists, but has none of these extensions"
    return describe_missing_path(source)


def use_rows(
    source: Source,
    name: str,
    convert: Callable[[Row], _Item],
    on_bad_row: OnBadRow,
    report: RowReport | None = None,
    bad_rows: Path | None = None,
) -> tuple[list[_Item], RowReport]:
    """Convert every row, and report bad rows.

    Args:
        source: source of the rows.
        name: name of the data in messages.
        convert: function that converts a row to an item, or raises :class:`BadRow` with the reason.
        on_bad_row: ``error`` reads all rows, then raises an error with the first bad rows; ``skip`` skips and counts
            them.
        report: report to update; None creates one.
        bad_rows: file to which each unused row is appended, with location and reason.

    Raises:
        ValueError: there are bad rows and ``on_bad_row`` is ``error``, no row can be used, or two columns could contain
            the same field.
    """
    items: list[_Item] = []
    report = RowReport(name) if report is None else report
    with ExitStack() as open_files:
        file = None if bad_rows is None else open_files.enter_context(open(bad_rows, "a", encoding="utf-8"))
        for location, row in as_rows(source).rows():
            report.location = location
            try:
                if isinstance(row, BadRow):  # a line that could not be parsed
                    raise row
                items.append(convert(row))
                report.used += 1
                report.locations.append(location)
            except AmbiguousColumns as error:
                raise UsageError(f"{name}: {location}: {error}") from error
            except BadRow as reason:
                report.drop(location, reason)
                if file is not None:
                    values = None if isinstance(row, BadRow) else dict(row)
                    json.dump({"where": location, "why": str(reason), "row": values}, file, default=str)
                    file.write("\n")
    if report.bad and on_bad_row == "error":
        raise UsageError(report.error_message() + ("" if bad_rows is None else f"\n  {bad_rows} lists all of them"))
    if not items:
        raise UsageError("\n  ".join([f"{report}: no row can be used", *report.first_bad]))
    return items, report
