"""Rows of local or remote JSON lines, JSON, CSV, parquet and Arrow files, with their locations."""

from __future__ import annotations

import csv
import glob
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from lightning_rlhf.data.row import BadRow, Row, TextRow, without_nested_nulls
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.paths import names_a_path

log = logging.getLogger(__name__)

LocatedRows = Iterator[tuple[str, Any]]
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
_SEPARATORS = re.compile(r"[\s,]*")
_PROBE_CHARACTERS = 1 << 20  # a file with a complete row in its first characters is JSON lines
_MAX_BLANK_LINES = 1_000_000  # a small gzip file can contain any number of them
_MAX_LINE_CHARACTERS = 1 << 26  # a small compressed file can contain a line that fills the memory
_MAX_CELL_CHARACTERS = (
    1 << 26
)  # characters of a CSV cell; Python's own limit of 131,072 is less than a long conversation
_COMPRESSED = (".gz", ".bz2", ".zst")
# Files that libraries write beside data: they describe data and have no rows.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_HELD_OUT_NAME = re.compile(r"(^|[^a-z])(test|val|valid|validation|dev|eval)([^a-z]|$)", re.IGNORECASE)
_TRAIN_NAME = re.compile(r"(^|[^a-z])train([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """Files that are read in sequence.

    Args:
        paths: local paths, or URLs that ``fsspec`` reads, of files whose extension is among :data:`FILE_KINDS`; text
            files can also end with ``.gz``, ``.bz2`` or ``.zst``.
    """

    paths: tuple[str, ...]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows with their file and line, or their number in files without lines.

        Raises:
            ValueError: a file cannot be read in the format of its extension.
        """
        for path in self.paths:
            _check_encoding(path)
            try:
                yield from FILE_KINDS[_extension(path)](path)
            except (OSError, HTTPError, EOFError, zlib.error) as error:  # no permission or network, truncated
                raise UsageError(f"cannot read {path!r}: {error}") from None


def expand(source: str) -> list[str]:
    """List the data files of a path, pattern or URL in alphabetical order; empty if nothing matches.

    Raises:
        ValueError: a directory has files of several splits.
    """
    if is_url(source):
        files = _expand_url(source)
    else:
        local = str(Path(source).expanduser())
        files = glob.glob(local, recursive=True) if glob.has_magic(local) and not Path(local).exists() else [local]
        if files == [local] and Path(local).is_dir():
            files = _files_of_directory(Path(local))
        files = [path for path in files if Path(path).is_file()]
    files = sorted(path for path in files if _extension(path) in FILE_KINDS)
    files = [path for path in files if PurePosixPath(path).name not in _DESCRIPTIONS] or files
    _check_single_split(source, [PurePosixPath(path).name for path in files])
    return files


def _files_of_directory(directory: Path) -> list[str]:
    """List the visible files of a directory that can have rows.

    In a clone of a data set of the hub, these are the training files of ``data/``, as for its hub id.
    """

    def files_of(folder: Path) -> list[str]:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        visible = [name for name in names if not name.startswith(".") and name not in _DESCRIPTIONS]
        return [str(folder / name) for name in visible if _extension(name) in FILE_KINDS]

    if files := files_of(directory):
        return files
    files = files_of(directory / "data")
    train = [path for path in files if _TRAIN_NAME.search(Path(path).name)]
    if train and len(train) < len(files):
        others = sorted(Path(path).name for path in files if path not in train)
        log.info("%s: the training files of data/ are read, and not %s", directory, ", ".join(others))
    return train or files


def _expand_url(url: str) -> list[str]:
    """List the files of a URL: the file itself, those of a directory, or those that match a pattern."""
    try:
        filesystem, path = fsspec.url_to_fs(url)
        if glob.has_magic(_without_query(path)):
            paths = filesystem.glob(path)
        else:
            paths = filesystem.ls(path, detail=False) if filesystem.isdir(path) else [path]
        return [filesystem.unstrip_protocol(name) for name in paths if filesystem.isfile(name)]
    except (OSError, HTTPError, ValueError, ImportError) as error:  # no network, unknown protocol, missing library
        raise UsageError(f"cannot read {url!r}: {' '.join(str(error).split())}") from None


def looks_like_a_path(source: str) -> bool:
    """Return whether a source without files looks like a path or URL; otherwise it is a hub id."""
    return _extension(source) in FILE_KINDS or is_url(source) or names_a_path(source) or glob.has_magic(source)


def is_url(source: str) -> bool:
    """Return whether a source begins with a protocol, such as ``https://``; ``fsspec`` reads it."""
    return _URL.match(source) is not None


def _check_single_split(source: str, names: list[str]) -> None:
    """Validate that a directory does not mix training and held-out files."""
    train = [name for name in names if _TRAIN_NAME.search(name)]
    held_out = [name for name in names if _HELD_OUT_NAME.search(name) and name not in train]
    if train and held_out:
        raise UsageError(
            f"{source!r} has files of several splits, {train[0]!r} and {held_out[0]!r}: list the files, or use a "
            f"pattern such as '*train*'"
        )


def _extension(path: str) -> str:
    path = _without_query(path)
    compressed = next((ending for ending in _COMPRESSED if path.endswith(ending)), "")
    return Path(path.removesuffix(compressed)).suffix


def _without_query(path: str) -> str:
    """Remove the query of a web address; elsewhere a question mark is part of a pattern."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def _open(path: str, mode: str = "rt") -> Any:
    """Open a local or remote file; invalid UTF-8 becomes surrogates, which :func:`is_unicode` detects."""
    text: dict[str, Any] = {}
    if "b" not in mode:
        text = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    if _without_query(path).endswith(".zst"):  # fsspec needs another package for it, pyarrow does not
        import pyarrow  # type: ignore[import-untyped]

        return io.TextIOWrapper(pyarrow.CompressedInputStream(fsspec.open(path, "rb").open(), "zstd"), **text)
    return fsspec.open(path, mode, compression="infer", **text)


def _check_encoding(path: str) -> None:
    """Validate the first bytes of a local file, so that a wrong encoding is one error instead of one per line.

    Raises:
        ValueError: the file is compressed but does not end with ``.gz``, or has another encoding than UTF-8.
    """
    if is_url(path) or path.endswith((*_COMPRESSED, ".parquet", ".arrow")):
        return
    try:
        with open(path, "rb") as file:
            first = file.read(2)
    except OSError as error:
        raise UsageError(f"cannot read {path!r}: {error}") from error
    if first == b"\x1f\x8b":
        raise UsageError(f"cannot read {path!r}: it is compressed by gzip: rename it to {Path(path).name + '.gz'!r}")
    if first in (b"\xff\xfe", b"\xfe\xff"):
        raise UsageError(f"cannot read {path!r}: it is encoded as UTF-16: save it as UTF-8")


def _json_lines(path: str) -> LocatedRows:
    """Yield rows, and a :class:`BadRow` for each line that is not a JSON object."""
    blank = 0
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_CHARACTERS), ""), start=1):
            if len(line) == _MAX_LINE_CHARACTERS:
                raise UsageError(f"cannot read {path!r}: line {number} has {_MAX_LINE_CHARACTERS:,} characters or more")
            blank = 0 if line.strip() else blank + 1
            if blank > _MAX_BLANK_LINES:
                raise UsageError(f"cannot read {path!r}: {_MAX_BLANK_LINES} lines before line {number} are blank")
            if number == 1 and re.match(r"\[\s*(\{|$)", line):  # the array of a .json file
                yield from _json(path)
                return
            if not blank:
                yield f"{path}:{number}", _parse_line(line.rstrip())


def _json(path: str) -> LocatedRows:
    """Yield the objects of an array, or objects in sequence, with the line where each begins."""
    with _open(path) as file:
        text = file.read()
    is_array = text.lstrip().startswith("[")
    first_lines = [line for line in text[:_PROBE_CHARACTERS].splitlines() if line.strip()]
    if not is_array and any(line[0] == "{" and isinstance(_parse_line(line), dict) for line in first_lines):
        yield from _json_lines(path)
        return
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    position = _skip_separators(text, text.find("[") + 1 if is_array else 0)
    while position < len(text) and not (is_array and text[position] == "]"):
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UsageError(
                f"cannot read {path!r}: JSON parse error in the row that begins at line {line}: {reason}; "
                f"in a .jsonl file, only the broken line would be a bad row"
            ) from error
        position = _skip_separators(text, position)
        yield f"{path}:{line}", _expect_object(row)
    if is_array and text[position:].strip() != "]":
        raise UsageError(f"cannot read {path!r}: JSON parse error: the file does not end with the array")


def _skip_separators(text: str, position: int) -> int:
    """Return the position after whitespace and commas."""
    match = _SEPARATORS.match(text, position)
    return position if match is None else match.end()


def _tsv(path: str) -> LocatedRows:
    """Yield rows of cells that tabs separate; quotes as in CSV."""
    return _csv(path, "\t")


def _csv(path: str, separator: str = ",") -> LocatedRows:
    """Yield rows of text cells; an unclosed quote makes only its own line a bad row."""
    with _open(path) as file:
        lines = file.readlines()
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    header: list[str] = []
    for number, cells in _parse_records(lines, separator):
        location = f"{path}:{number}"
        if isinstance(cells, BadRow):
            if not header:
                raise UsageError(f"cannot read {path!r}: the header in line {number}: {cells}")
            yield location, cells
        elif not header:
            header = [name.strip() for name in cells]
            if len(header) == 1 and (other := re.search(r"[;\t|]", header[0])):
                raise UsageError(
                    f"cannot read {path!r}: its header {header[0]!r} is one cell; separate cells by commas, "
                    f"not by {other[0]!r}, or by tabs in a file that is called .tsv"
                )
            if len(set(header)) != len(header):
                raise UsageError(f"cannot read {path!r}: two columns have the same name in the header {header}")
        elif len(cells) != len(header):
            yield location, BadRow(f"{len(cells)} cells, the header has {len(header)}", "cells do not match the header")
        else:
            yield location, TextRow(zip(header, cells, strict=True))


def _parse_records(lines: list[str], separator: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield line numbers and cells; if a record over several lines is broken, only its first line is a bad row."""
    columns, position = 0, 0

    def remaining_lines() -> Iterator[str]:
        nonlocal position
        while position < len(lines):
            position += 1
            yield lines[position - 1]

    reader = csv.reader(remaining_lines(), strict=True, delimiter=separator)
    while (begin := position) < len(lines):
        cells: list[str] | BadRow
        try:
            cells = next(reader)
            columns = columns or len(cells)
        except StopIteration:
            return
        except csv.Error as error:
            cells = BadRow(f"not CSV: {error}", "not CSV")
        broken = isinstance(cells, BadRow) or (cells and len(cells) != columns)
        if broken and position > begin + 1:
            reason = "not CSV: a quote is not closed"
            cells, position = BadRow(reason, "not CSV"), begin + 1
            reader = csv.reader(remaining_lines(), strict=True, delimiter=separator)
        if cells:
            yield begin + 1, cells


def _parquet(path: str) -> LocatedRows:
    """Yield rows with their numbers; one batch is in memory at a time."""
    from pyarrow import parquet

    return _rows_of_batches(path, lambda file: parquet.ParquetFile(file).iter_batches())


def _arrow(path: str) -> LocatedRows:
    """Yield rows of an Arrow file or stream with their numbers."""
    from pyarrow import ipc

    def batches(file: Any) -> Iterable[Any]:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        return map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader

    return _rows_of_batches(path, batches)


def _rows_of_batches(path: str, batches: Callable[[Any], Iterable[Any]]) -> LocatedRows:
    """Yield rows with their numbers from the batches of an open file."""
    import pyarrow

    number = 0
    try:
        with _open(path, "rb") as file:
            for batch in batches(file):
                for row in batch.to_pylist():
                    yield f"{path}[{number}]", without_nested_nulls(row)
                    number += 1
    except pyarrow.ArrowException as error:
        raise UsageError(f"cannot read {path!r}: {' '.join(str(error).split())}") from error


def _parse_line(line: str) -> Any:
    try:
        return _expect_object(json.loads(line))
    except json.JSONDecodeError as error:
        remedy = ", as in a dict of Python: write rows with json.dumps" if line.startswith("{'") else ""
        return BadRow(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{remedy}", "not JSON")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of levels
        return BadRow(f"not readable JSON: {error}", "not JSON")


def _expect_object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    return BadRow(f"a JSON {type(value).__name__}, expected an object", "not an object")


FILE_KINDS: dict[str, Callable[[str], LocatedRows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".ndjson": _json_lines,
    ".tsv": _tsv,
    ".arrow": _arrow,
}
