"""A file of responses that grows row by row and can be gone on with after any interruption."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FORMATS = (".jsonl", ".json", ".parquet")


class ResponsesFile:
    """Rows in their order, written as they come; beside them the settings that they were made with.

    JSON lines grow in the file itself, other formats in ``<name>.part.jsonl``, of which :meth:`finish` makes the file.

    Args:
        path: of the file; its ending is its format.
        settings: what decides about the rows, as plain values.
        total: rows that it will have.

    Raises:
        ValueError: a format that is not known.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], total: int) -> None:
        check_format(path)
        self.path, self._settings, self.total = path, dict(settings), total
        self._beside = path.with_name(f"{path.name}.settings.json")
        self._rows = path if path.suffix == ".jsonl" else path.with_name(f"{path.name}.part.jsonl")
        self._lock: IO[str] | None = None
        self.done = 0

    def begin(self) -> int:
        """Begin the file, or go on with it; a last line that was cut short is dropped.

        Returns:
            Rows that are there already.

        Raises:
            ValueError: the file is somebody else's, was begun with other settings, is being written, or cannot be.
        """
        if self.path.exists() and not self._beside.exists():
            raise ValueError(f"{self.path} is there already and was not begun by generate: choose another name")
        with writing(self.path, "choose another name"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._beside.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is being written by another process") from None
        self._settle(self._lock)
        if self.path.exists() and self._rows != self.path:
            self.done = self.total
        elif self._rows.exists():
            self.done = _drop_torn_line(self._rows)
        if self.done > self.total:
            raise ValueError(f"{self.path} has {self.done} rows, and there are only {self.total} prompts")
        return self.done

    def _settle(self, file: IO[str]) -> None:
        """Write the settings, or compare them with those that are there."""
        file.seek(0)
        if not (text := file.read()):
            with writing(self.path, "choose another name"):
                file.write(json.dumps(self._settings, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            return
        try:
            begun = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._beside} is damaged: remove it and {self.path}") from error
        names = [name for name in {**begun, **self._settings} if begun.get(name) != self._settings.get(name)]
        if names:
            differ = "; ".join(f"{name} was {begun.get(name)!r}, is {self._settings.get(name)!r}" for name in names)
            raise ValueError(
                f"{self.path} was begun with other settings ({differ}): give those, choose another name, or remove the "
                f"file and {self._beside.name}"
            )

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; they are on disk when this returns.

        Raises:
            ValueError: they cannot be written.
        """
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with writing(self._rows, "the same command goes on where it is"), self._rows.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.done += len(rows)

    def finish(self) -> None:
        """Make the file of its rows, if it is not made of lines.

        Raises:
            ValueError: the rows do not fit into the format, or cannot be written.
        """
        if self._rows == self.path:
            return
        if not self.path.exists():
            draft = self.path.with_name(f"{self.path.name}.new")
            with writing(self.path, f"the rows are in {self._rows}, and the same command goes on from there"):
                _WRITERS[self.path.suffix](read_lines(self._rows), draft)
                draft.replace(self.path)
        self._rows.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others write it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    """Say what cannot be written, and what to do.

    Args:
        path: of a file.
        then: what to do, at the end of a sentence.

    Raises:
        ValueError: where an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; {then}") from error


def check_format(path: Path) -> None:
    """Refuse a file whose ending names no format.

    Raises:
        ValueError: its ending.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"responses are written as {', '.join(FORMATS)}, got {str(path)!r}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _drop_torn_line(path: Path) -> int:
    """Cut the file behind its last line break; how many lines are left."""
    whole = lines = 0
    with path.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                whole, lines = whole + len(line), lines + 1
        file.truncate(whole)
    return lines


def _write_json(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow itself would take those of the first row
    try:
        parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), path)
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"the rows do not fit into parquet, but they are in {path.stem}.part.jsonl: {error}"
        ) from error


_WRITERS = {".json": _write_json, ".parquet": _write_parquet}
