"""A file of responses that grows row by row and can be gone on with after any interruption."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
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
            ValueError: the file is somebody else's, was begun with other settings, or is being written.
        """
        if not self._beside.exists():
            if self.path.exists():
                raise ValueError(f"{self.path} is there already and was not begun by generate: choose another name")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._beside.with_name(f"{self._beside.name}.new")
            draft.write_text(json.dumps(self._settings, indent=2) + "\n")
            draft.replace(self._beside)
        self._lock = self._beside.open()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path} is being written by another process") from None
        self._compare(json.loads(self._beside.read_text()))
        if self.path.exists() and self._rows != self.path:
            self.done = self.total
        elif self._rows.exists():
            self.done = _drop_torn_line(self._rows)
        if self.done > self.total:
            raise ValueError(f"{self.path} has {self.done} rows, and there are only {self.total} prompts")
        return self.done

    def _compare(self, begun: dict[str, Any]) -> None:
        names = [name for name in {**begun, **self._settings} if begun.get(name) != self._settings.get(name)]
        if names:
            differ = "; ".join(f"{name} was {begun.get(name)!r}, is {self._settings.get(name)!r}" for name in names)
            raise ValueError(
                f"{self.path} was begun with other settings ({differ}): give those, choose another name, or remove the "
                f"file and {self._beside.name}"
            )

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; they are on disk when this returns."""
        with self._rows.open("ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(rows)

    def finish(self) -> None:
        """Make the file of its rows, if it is not made of lines.

        Raises:
            ValueError: the rows do not fit into the format.
        """
        if self._rows != self.path and not self.path.exists():
            draft = self.path.with_name(f"{self.path.name}.new")
            _WRITERS[self.path.suffix](read_lines(self._rows), draft)
            draft.replace(self.path)
            self._rows.unlink()

    def close(self) -> None:
        """Let others write it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


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

    try:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"the rows do not fit into parquet, take .jsonl: {error}") from error


_WRITERS = {".json": _write_json, ".parquet": _write_parquet}
