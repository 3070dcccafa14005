"""Answers of judges, kept by the content of the question, so that an equal one is asked only once."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from lightning_rlhf.expected_errors import UsageError, counted

log = logging.getLogger(__name__)


class Answers:
    """Answers by the key of the question, for all threads and event loops of a process.

    Args:
        path: file that keeps the answers, see :class:`AnswerFile`; None keeps them in memory.
    """

    def __init__(self, path: str | None) -> None:
        self._kept: dict[str, str] | AnswerFile = {} if path is None else AnswerFile(Path(path).expanduser())
        self._pending: dict[str, Future[str]] = {}  # answers to questions that are being asked
        self._lock = threading.Lock()

    async def get(self, key: str, ask: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """Return the answer to a question, and whether it was kept or another caller was already asking.

        Args:
            key: digest of the question.
            ask: asks the question. If it raises an error, nothing is kept.
        """
        while True:
            with self._lock:
                if (known := self._kept.get(key)) is not None:
                    return known, True
                pending = self._pending.get(key)
                if pending is None:
                    own = self._pending[key] = Future()
                    break
            try:
                return await asyncio.shield(asyncio.wrap_future(pending)), True
            except asyncio.CancelledError:
                if not pending.cancelled():  # it was this caller that was cancelled
                    raise
        try:
            answer = await ask()
            with self._lock:
                self._kept[key] = answer
        except BaseException as error:
            self._pending.pop(key)
            if isinstance(error, asyncio.CancelledError):
                own.cancel()  # one of those that wait asks instead
            else:
                own.set_exception(error)
            raise
        self._pending.pop(key)
        own.set_result(answer)
        return answer, False


class AnswerFile:
    """Answers in a file of JSON lines, which a resumed run continues and other processes may extend too.

    Memory has only the places of the answers. Those that another process adds are not seen.

    Args:
        path: file, created with the first answer.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise UsageError(f"answers must be a file, got the directory {path}: add a name, such as answers.jsonl")
        self.path = path

    def get(self, key: str) -> str | None:
        """Return an answer; None if there is none, or the file was changed."""
        if key not in self._offsets:
            return None
        with self.path.open("rb") as file:
            file.seek(self._offsets[key])
            record = _record(file.readline())
        return record["answer"] if record is not None and record["key"] == key else None

    def __setitem__(self, key: str, answer: str) -> None:
        offsets = self._offsets
        line = json.dumps({"key": key, "answer": answer}).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            _lock(file)
            offsets[key] = file.seek(0, os.SEEK_END)
            file.write(line)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Place of each answer's line in the file. A line that a killed process began is ended."""
        offsets: dict[str, int] = {}
        if not self.path.is_file():
            return offsets
        with self.path.open("rb+") as file:
            _lock(file)
            position = damaged = 0
            line = b"\n"
            for line in file:
                record = _record(line)
                if record is not None:
                    offsets[record["key"]] = position
                damaged += record is None
                position += len(line)
            if not line.endswith(b"\n"):
                file.write(b"\n")
        if damaged:
            log.warning("%s of %s cannot be read: its question is asked again", counted(damaged, "line"), self.path)
        return offsets


def _lock(file: IO[bytes]) -> None:
    """Lock a file against other processes until it is closed, where the file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of the file; None if it is damaged."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(line)
        if isinstance(record["key"], str) and isinstance(record["answer"], str):
            return dict(record)
    return None
