"""A JSON lines file of responses that can be continued after an interruption."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lightning_rlhf.expected_errors import UsageError

RESPONSES = "responses"
TOKENS = "response_tokens"
FINISH_REASONS = "finish_reasons"
PROMPT_TOKENS = "prompt_tokens"
RESPONSE_MESSAGES = "response_messages"
TURNS = "turns"
ENVIRONMENT_REWARDS = "environment_rewards"
STOP_REASONS = "stop_reasons"
END_TOKENS = "end_tokens"
OF_CONVERSATIONS = {  # argument of reward functions: column
    "conversations": RESPONSE_MESSAGES,
    "turns": TURNS,
    "environment_rewards": ENVIRONMENT_REWARDS,
    "stop_reasons": STOP_REASONS,
    "end_tokens": END_TOKENS,
}
OUTPUT_COLUMNS = (RESPONSES, TOKENS, FINISH_REASONS, PROMPT_TOKENS, *OF_CONVERSATIONS.values())


class ResponsesFile:
    """Rows in the order of the prompts, with their settings in ``<name>.settings.json``.

    Args:
        path: path of the file, which ends with ``.jsonl``.
        settings: settings that determine the rows, as plain values.
        total: number of rows when complete.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], total: int) -> None:
        self.path = path
        self.total = total
        self.done = 0
        self._settings = dict(settings)
        self._settings_path = path.with_name(f"{path.name}.settings.json")
        self._lock: IO[str] | None = None

    def begin(self) -> int:
        """Create the file, or continue it without an incomplete last line, and return its number of rows.

        Raises:
            UsageError: the file was not written by ``generate``, has other settings, is in use, or cannot be written.
        """
        if self.path.exists() and not self._settings_path.exists():
            raise UsageError(f"{self.path} exists already and was not written by generate: choose another name")
        with write_errors(self.path, "choose another name"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._settings_path.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is being written by another process: wait for it") from None
        self._check_settings(self._lock)
        if self.path.exists():
            self.done = _remove_incomplete_line(self.path)
        if self.done > self.total:
            raise UsageError(f"{self.path} has {self.done} rows for {self.total} prompts: choose another name")
        return self.done

    def _check_settings(self, file: IO[str]) -> None:
        """Compare the settings with those in the file, or write them if it is empty."""
        file.seek(0)
        text = file.read()
        if not text:
            with write_errors(self.path, "choose another name"):
                file.write(json.dumps(self._settings, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            return
        try:
            earlier = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{self._settings_path} is damaged: remove it and {self.path}") from error
        names = [name for name in {**earlier, **self._settings} if earlier.get(name) != self._settings.get(name)]
        if names:
            changes = "; ".join(f"{name} was {earlier.get(name)!r}, is {self._settings.get(name)!r}" for name in names)
            raise UsageError(
                f"{self.path} was started with other settings ({changes}): use the same, choose another name, or "
                f"remove the file and {self._settings_path.name}"
            )

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, and sync them to the disk.

        Raises:
            UsageError: the rows cannot be written.
        """
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with write_errors(self.path, "the same command continues after the last row"), self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.done += len(rows)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextmanager
def write_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError into a UsageError with the path and a remedy."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; {remedy}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _remove_incomplete_line(path: Path) -> int:
    """Truncate a file after its last line break, and return the number of lines."""
    size = 0
    lines = 0
    with path.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                size += len(line)
                lines += 1
        file.truncate(size)
    return lines
