"""Rows of files: JSON lines, JSON, CSV and parquet, here or behind a URL, each with the line it stands on."""

from __future__ import annotations

import csv
import glob
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from lightning_rlhf.data.row import BadRow, Row, TextRow
from lightning_rlhf.paths import names_a_path

Placed = Iterator[tuple[str, Any]]
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
_SPACE = re.compile(r"[\s,]*")
_BEGINNING = 1 << 20  # characters in which a whole row tells JSON lines from JSON
_MOST_BLANK = 1_000_000  # a small gzip can hold any number of them
_LARGEST_CELL = 1 << 26  # characters of a CSV cell; Python's own limit of 131,072 is less than a long conversation
_HELD_OUT = re.compile(r"(^|[^a-z])(test|val|valid|validation|dev|eval)([^a-z]|$)", re.IGNORECASE)
_TRAINED = re.compile(r"(^|[^a-z])train([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """Files read one behind the other.

    Args:
        paths: of ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` files, ``.gz`` behind all but the last, here or as
            URLs that ``fsspec`` reads.
    """

    paths: tuple[str, ...]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Rows with their file and line, or their number in the file where it has no lines.

        Raises:
            ValueError: a file that cannot be read as what it is called.
        """
        for path in self.paths:
            _refuse_other_bytes(path)
            try:
                yield from FILE_KINDS[_kind(path)](path)
            except (OSError, EOFError, zlib.error) as error:  # no permission, no gzip, half a gzip
                raise ValueError(f"cannot read {path!r}: {error}") from error


def expand(source: str) -> list[str]:
    """The data files that a path, pattern or URL stands for, in alphabetical order; none where there are none.

    Raises:
        ValueError: a directory with files of several splits.
    """
    if is_url(source):
        files = _remote(source)
    else:
        here = str(Path(source).expanduser())
        files = glob.glob(here, recursive=True) if glob.has_magic(here) and not Path(here).exists() else [here]
        if files == [here] and Path(here).is_dir():
            files = [str(path) for path in Path(here).iterdir()]
        files = [path for path in files if Path(path).is_file()]
    files = sorted(path for path in files if _kind(path) in FILE_KINDS)
    _refuse_mixed_splits(source, [PurePosixPath(path).name for path in files])
    return files


def _remote(url: str) -> list[str]:
    """What lies behind a URL: the file itself, those of a directory, or those that a pattern fits."""
    try:
        filesystem, path = fsspec.url_to_fs(url)
        if glob.has_magic(_plain(path)):
            found = filesystem.glob(path)
        else:
            found = filesystem.ls(path, detail=False) if filesystem.isdir(path) else [path]
        return [filesystem.unstrip_protocol(name) for name in found if filesystem.isfile(name)]
    except (OSError, ValueError, ImportError) as error:  # no network, no such protocol, no library for it
        raise ValueError(f"cannot read {url!r}: {' '.join(str(error).split())}") from error


def looks_like_a_path(source: str) -> bool:
    """Whether a text that stands for no file was meant to; all else is a hub id."""
    kind = Path(source.removesuffix(".gz")).suffix in FILE_KINDS
    return kind or is_url(source) or names_a_path(source) or glob.has_magic(source)


def is_url(source: str) -> bool:
    """Whether ``fsspec`` is asked for it by its protocol."""
    return _URL.match(source) is not None


def _refuse_mixed_splits(source: str, names: list[str]) -> None:
    """A directory read whole must not put what is held out among what is learnt from."""
    trained = [name for name in names if _TRAINED.search(name)]
    held_out = [name for name in names if _HELD_OUT.search(name) and name not in trained]
    if trained and held_out:
        raise ValueError(
            f"{source!r} holds files of several splits, {trained[0]!r} and {held_out[0]!r}: name the files, or give a "
            f"pattern such as '*train*'"
        )


def _kind(path: str) -> str:
    return Path(_plain(path).removesuffix(".gz")).suffix


def _plain(path: str) -> str:
    """A web address without what follows a question mark, which elsewhere stands for one letter of a pattern."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def _open(path: str, mode: str = "rt") -> Any:
    """A file here or behind a URL; bytes that are no UTF-8 become what :func:`is_unicode` finds."""
    text = {} if "b" in mode else {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    return fsspec.open(path, mode, compression="infer", **text)


def _refuse_other_bytes(path: str) -> None:
    """Say of a file here what its first bytes tell, where its lines would be blamed one by one.

    Raises:
        ValueError: it is compressed and not called so, or text of another encoding.
    """
    if is_url(path) or path.endswith((".gz", ".parquet")):
        return
    try:
        with open(path, "rb") as file:
            first = file.read(2)
    except OSError as error:
        raise ValueError(f"cannot read {path!r}: {error}") from error
    if first == b"\x1f\x8b":
        raise ValueError(f"cannot read {path!r}: it is compressed by gzip: call it {Path(path).name + '.gz'!r}")
    if first in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"cannot read {path!r}: it is UTF-16, as some programs export: save it as UTF-8")


def _json_lines(path: str) -> Placed:
    """A line that is no JSON object comes as the error that says so."""
    blank = 0
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            blank = 0 if line.strip() else blank + 1
            if blank > _MOST_BLANK:
                raise ValueError(f"cannot read {path!r}: {_MOST_BLANK} lines before line {number} are blank")
            if not blank:
                yield f"{path}:{number}", _parsed(line.rstrip())


def _json(path: str) -> Placed:
    """An array of objects, or objects one behind the other; with the line where each begins."""
    with _open(path) as file:
        text = file.read()
    is_array = text.lstrip().startswith("[")
    beginning = [line for line in text[:_BEGINNING].splitlines() if line.strip()]
    if not is_array and any(line[0] == "{" and isinstance(_parsed(line), dict) for line in beginning):
        yield from _json_lines(path)
        return
    decoder, line, counted = json.JSONDecoder(), 1, 0
    position = _behind(text, text.find("[") + 1 if is_array else 0)
    while position < len(text) and not (is_array and text[position] == "]"):
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(
                f"cannot read {path!r}: JSON parse error in the row that begins at line {line}: {said}; "
                f"of a .jsonl file only the broken line would be lost"
            ) from error
        position = _behind(text, position)
        yield f"{path}:{line}", _object(row)
    if is_array and text[position:].strip() != "]":
        raise ValueError(f"cannot read {path!r}: JSON parse error: the array does not end with the file")


def _behind(text: str, position: int) -> int:
    """The position of what comes behind space and commas."""
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def _csv(path: str) -> Placed:
    """Cells are text. A quote that is never closed costs its own line, not the lines behind it."""
    with _open(path) as file:
        lines = file.readlines()
    csv.field_size_limit(_LARGEST_CELL)
    header: list[str] = []
    for number, cells in _records(lines):
        where = f"{path}:{number}"
        if isinstance(cells, BadRow):
            if not header:
                raise ValueError(f"cannot read {path!r}: the header in line {number}: {cells}")
            yield where, cells
        elif not header:
            header = [name.strip() for name in cells]
            if len(header) == 1 and (other := re.search(r"[;\t|]", header[0])):
                raise ValueError(
                    f"cannot read {path!r}: its header {header[0]!r} is one cell; cells are separated by commas here, "
                    f"not by {other[0]!r}"
                )
            if len(set(header)) != len(header):
                raise ValueError(f"cannot read {path!r}: two columns have the same name in the header {header}")
        elif len(cells) != len(header):
            yield where, BadRow(f"{len(cells)} cells, the header has {len(header)}", "cells do not match the header")
        else:
            yield where, TextRow(zip(header, cells, strict=True))


def _records(lines: list[str]) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Line numbers and cells. A record over several lines that is broken is taken for a broken first line."""
    columns, position = 0, 0

    def following() -> Iterator[str]:
        nonlocal position
        while position < len(lines):
            position += 1
            yield lines[position - 1]

    reader = csv.reader(following(), strict=True)
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
            reason = "not CSV: a quote is opened and not closed"
            cells, position = BadRow(reason, "not CSV"), begin + 1
            reader = csv.reader(following(), strict=True)
        if cells:
            yield begin + 1, cells


def _parquet(path: str) -> Placed:
    """Rows with their numbers, a batch of them in memory at a time."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    number = 0
    try:
        with _open(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}[{number}]", row
                    number += 1
    except pyarrow.ArrowException as error:
        raise ValueError(f"cannot read {path!r}: {' '.join(str(error).split())}") from error


def _parsed(line: str) -> Any:
    try:
        return _object(json.loads(line))
    except json.JSONDecodeError as error:
        return BadRow(f"not JSON: {error.msg} at column {error.colno}", "not JSON")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of brackets
        return BadRow(f"not JSON that can be read: {error}", "not JSON")


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    return BadRow(f"a JSON {type(value).__name__}, expected an object", "not an object")


FILE_KINDS: dict[str, Callable[[str], Placed]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
