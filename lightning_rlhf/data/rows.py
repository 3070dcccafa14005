"""Rows of data: where they come from, and what is said of those that cannot be used."""

from __future__ import annotations

import json
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
from lightning_rlhf.data.row import LeftOut
from lightning_rlhf.data.row import Row as Row
from lightning_rlhf.data.row import RowSource as RowSource
from lightning_rlhf.paths import describe_missing_path, hub_error_message

OnBadRow = Literal["error", "skip"]
# With a path among the types, jsonargparse takes a file's name for what it is, and does not read it as configuration;
# behind the others, or it would write them out as the text that Python has for them.
Source = str | RowSource | list[str | RowSource | Path] | Path
_Item = TypeVar("_Item")
_SHOWN = 5


@dataclass
class RowReport:
    """How many rows were read, kept, and dropped for which reason.

    Args:
        name: of the data, for messages.
        kept: rows in use.
        dropped: reason to number of rows.
        cut: what was cut to fit, to number of rows; they are in use.
        understood: which column was taken for what, to number of rows in use.
        unknown: parts of the texts in use that the tokenizer does not know, to how often they occur.
        unknown_rows: rows with such parts.
        bad: how many of the dropped rows are faults of the data; the others are left out on purpose.
        first_bad: where the first of them stand, and the first for each further reason, and why they cannot be used.
        advice: which options make bad rows usable, each once.
        places: where each row in use stands, such as ``file:line``.
    """

    name: str
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    understood: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    unknown_rows: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list, repr=False)

    def drop(self, where: str, reason: BadRow) -> None:
        """Count a row that is not used."""
        self.dropped[reason.kind] += 1
        if isinstance(reason, LeftOut):
            return
        self.bad += 1
        if reason.advice and reason.advice not in self.advice:
            self.advice.append(reason.advice)
        rare = self.dropped[reason.kind] == 1 and len(self.first_bad) < 2 * _SHOWN
        if len(self.first_bad) < _SHOWN or rare:  # a file may hold millions of bad rows
            self.first_bad.append(f"{where}: {reason}")

    def unknown_parts(self) -> str:
        """What is said where the tokenizer does not know all of the texts; nothing where it does."""
        if not self.unknown:
            return ""
        shown = ", ".join(f"{part!r} {n}" for part, n in self.unknown.most_common(_SHOWN))
        more = f" and {len(self.unknown) - _SHOWN} others" if len(self.unknown) > _SHOWN else ""
        rows = f"{self.unknown_rows} of {self.kept} rows"
        return f"the tokenizer does not know {self.unknown.total()} parts of the texts in {rows}: {shown}{more}"

    def refusal(self) -> str:
        """What is said where bad rows end a run."""
        more = [f"... and {self.bad - len(self.first_bad)} more"] if self.bad > len(self.first_bad) else []
        said = f"{self.name}: {self.bad} of {self.kept + self.dropped.total()} rows cannot be used"
        return "\n  ".join([f"{said} (on_bad_row: skip leaves them out):", *self.first_bad, *more, *self.advice])

    def __str__(self) -> str:
        read = self.kept + sum(self.dropped.values())
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in self.dropped.most_common())
        cuts = "".join(f"; cut {n}: {what}" for what, n in self.cut.most_common())
        return f"{self.name}: {read} rows read, {self.kept} kept{reasons}{cuts}"


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
class Several:
    """Sources one behind the other.

    Args:
        sources: at least one.
    """

    sources: Sequence[RowSource]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows of each."""
        for source in self.sources:
            yield from source.rows()


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, read by ``datasets``. Code from the hub is never run.

    Args:
        path: hub id.
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

        try:
            dataset = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            what = f"split {self.split!r}, as a dataset of the hub"
            if isinstance(error, OSError):
                said = hub_error_message(self.path, error)
            else:  # the hub gave it, and it has no such split or configuration, or is broken
                said = str(error.__cause__ or error).strip().split("\n")[0]
            raise ValueError(f"cannot read {self.path!r}, {what}: {said}") from error
        for number, row in enumerate(dataset):
            yield f"{self.path}[{number}]", row


def as_rows(source: Source) -> RowSource:
    """A bare string is short for files or a hub id; a list is read one behind the other.

    Raises:
        FileNotFoundError: it looks like a path and nothing is there.
        ValueError: an empty list, or a directory with files of several splits.
    """
    if isinstance(source, list):
        if not source:
            raise ValueError("the list of data is empty: give at least one file, hub id or row source")
        return Several([as_rows(part) for part in source])
    if not isinstance(source, str | Path):
        return source
    source = str(source)
    if files := expand(source):
        return Files(tuple(files))
    if looks_like_a_path(source):
        raise FileNotFoundError(
            f"no data at {source!r}: expected an existing {', '.join(FILE_KINDS)} file, a directory or pattern of "
            f"them, a URL such as 'hf://datasets/owner/name/file.parquet', or a hub id such as 'Anthropic/hh-rlhf'; "
            f"{_what_is_there(source)}"
        )
    return HubDataset(source)


def _what_is_there(source: str) -> str:
    """Of a source without data files: where was looked, or what lies there instead."""
    if is_url(source):
        return f"there is no such file behind {source}"
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir())[:5]
        return f"{path.absolute()} has {', '.join(found) or 'nothing in it'}"
    if path.is_file():
        return f"{path.absolute()} is there, and its ending says none of these"
    return describe_missing_path(source)


def use_rows(
    source: Source,
    name: str,
    convert: Callable[[Row], _Item],
    on_bad_row: OnBadRow,
    report: RowReport | None = None,
    bad_rows: Path | None = None,
) -> tuple[list[_Item], RowReport]:
    """Convert every row, and account for those that cannot be used.

    Args:
        source: of the rows.
        name: of the data, for messages.
        convert: makes an item of a row, or raises :class:`BadRow` saying why it cannot.
        on_bad_row: ``error`` reads everything, then fails naming the first bad rows; ``skip`` leaves them out and
            counts.
        report: to count in; None makes one.
        bad_rows: file to which each row that is not used is added, with where it stands and why.

    Raises:
        ValueError: bad rows and ``on_bad_row`` is ``error``; no row is left; or a column could be meant by two names.
    """
    items: list[_Item] = []
    report = RowReport(name) if report is None else report
    with ExitStack() as open_files:
        notes = None if bad_rows is None else open_files.enter_context(open(bad_rows, "a", encoding="utf-8"))
        for where, row in as_rows(source).rows():
            try:
                if isinstance(row, BadRow):  # a line that is no row at all
                    raise row
                items.append(convert(row))
                report.kept += 1
                report.places.append(where)
            except AmbiguousColumns as error:
                raise ValueError(f"{name}: {where}: {error}") from error
            except BadRow as reason:
                report.drop(where, reason)
                if notes is not None:
                    held = None if isinstance(row, BadRow) else dict(row)
                    json.dump({"where": where, "why": str(reason), "row": held}, notes, default=str)
                    notes.write("\n")
    if report.bad and on_bad_row == "error":
        raise ValueError(report.refusal() + ("" if bad_rows is None else f"\n  all of them are in {bad_rows}"))
    if not items:
        raise ValueError("\n  ".join([f"{report}: nothing is left to use", *report.first_bad]))
    return items, report
