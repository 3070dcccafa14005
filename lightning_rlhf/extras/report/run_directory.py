"""Reading the directory of a run: metrics, configuration, environment, rollouts."""

from __future__ import annotations

import csv
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_rlhf.callbacks.records.run_files import HEALTH_SETTINGS, ROLLOUT_FILE, RUN_END, THUMBNAIL, read_metrics
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.health.monitor import Finding, HealthMonitor
from lightning_rlhf.extras.records.values import as_json, parsed
from lightning_rlhf.extras.report.check_states import check_states

log = logging.getLogger(__name__)
ENGINE = "engine.json"  # description of the engine of the rollouts
_FILES = ("metrics.csv", "config.yaml", "env.json", HEALTH_SETTINGS, RUN_END)
_TOKENS = b', "tokens": {"ids": ['  # outside of a text, whose quotation marks have a backslash
_MAX_SETTINGS = 100_000  # of a configuration; aliases of YAML can make a small file endless
_MAX_THUMBNAIL_BYTES = 1 << 16  # RolloutLog writes smaller ones
_JPEG = b"\xff\xd8\xff"  # begins each file of that format
_MAX_ROLLOUT_BYTES = 128 << 20  # of the responses of a step; a page with more is too slow to use


def end_state(directory: Path) -> dict[str, str]:
    """Return the state of a run by the file that ReportPage writes at its end, and the error that ended it."""
    end = _object_in(directory / RUN_END)
    error = str(end.get("error") or "")
    stopped = "failed"
    if error.startswith(("Interrupted", "KeyboardInterrupt")):
        stopped = "interrupted"
    return {"state": "running" if not end else stopped if error else "ended", "error": error}


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may continue while it is read.

    Files that are links out of the directory, or are not regular files, are not read.

    Args:
        path: directory with ``metrics.csv``.

    Raises:
        UsageError: the path is not a directory with ``metrics.csv``.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            fault = "does not exist"
            if self.path.exists():
                fault = "is not a directory"
            raise UsageError(f"{self.path} {fault}: expected the directory of a run, its default_root_dir")
        if not self._has(self.path / "metrics.csv"):
            if (self.path / "metrics.csv").is_file():
                raise UsageError(
                    f"{self.path / 'metrics.csv'} is a link out of its directory, which is not followed: pass the "
                    f"directory with the file"
                )
            below = sorted(str(path.parent) for path in self.path.glob("*/metrics.csv"))
            runs = f"; runs below it: {', '.join(below[:8])}" if below else ""
            raise UsageError(
                f"{self.path} has no metrics.csv, which a run writes when training begins: expected the "
                f"default_root_dir of a run, or for inspect a folder that has such runs{runs}"
            )

    def _has(self, path: Path) -> bool:
        return _is_inside(self.path, path)

    def signature(self, responses: bool = True) -> tuple[Any, ...]:
        """Return names, times and sizes of the files that are read: equal as long as they do not change.

        Args:
            responses: whether the files of responses are among them.
        """
        paths = [self.path / name for name in _FILES]
        files = [(path.name, path.stat()) for path in paths if path.is_file()]
        files += [(entry.name, entry.stat()) for entry in (self._rollout_entries() if responses else ())]
        return tuple((name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in files)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return the step and the metrics of each row of ``metrics.csv``, without missing values and NaN."""
        rows = []
        path = self.path / "metrics.csv"
        with _damaged(path):
            for row in read_metrics(path):
                values = {name: float(text) for name, text in row.items() if text and name != "step"}
                rows.append((int(row["step"]), {k: v for k, v in values.items() if math.isfinite(v)}))
        return rows

    def config(self) -> dict[str, Any]:
        """Return the values of ``config.yaml`` by dotted names, without ``ckpt_path``; empty without the file."""
        path = self.path / "config.yaml"
        if not self._has(path):
            return {}
        with _damaged(path):
            settings = _mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
            settings.pop("ckpt_path", None)  # a resumed run has no other settings
            return dict(islice(_flat("", settings), _MAX_SETTINGS))

    def environment(self) -> dict[str, Any]:
        """Return ``env.json``: command, Python, packages and devices, with the engine; empty without the files."""
        return self._json("env.json") | self._json(ENGINE)

    def state(self) -> dict[str, Any]:
        """Return whether the run has ended.

        Returns:
            ``state`` is ``ended``, ``failed``, ``interrupted`` by Ctrl-C or a signal, or ``running`` without the file
            that ReportPage writes at the end, which a killed run lacks too; ``error`` is that of a failed or
            interrupted run; ``modified`` is the time of the last metrics.
        """
        return {**end_state(self.path), "modified": (self.path / "metrics.csv").stat().st_mtime}

    def findings(self, rows: Sequence[tuple[int, dict[str, float]]] | None = None) -> list[Finding]:
        """Return the health checks that fail for the metrics.

        The callback HealthChecks wrote which ones apply; without its file, all checks and logged rewards do.

        Args:
            rows: result of :meth:`rows`; None reads it.
        """
        rows = self.rows() if rows is None else rows
        monitor = HealthMonitor(**self._health_settings(rows))
        for step, row in rows:
            monitor.add(step, row)
        return monitor.findings

    def checks(self, rows: Sequence[tuple[int, dict[str, float]]], findings: Sequence[Finding]) -> list[dict[str, str]]:
        """Return name, state and a note of each health check; see :func:`check_states`.

        Args:
            rows: result of :meth:`rows`.
            findings: result of :meth:`findings`.
        """
        return check_states(rows, findings, **self._health_settings(rows))

    def _health_settings(self, rows: Sequence[tuple[int, dict[str, float]]]) -> dict[str, Any]:
        """Return the arguments of HealthMonitor."""
        settings = self._json(HEALTH_SETTINGS) or {"rewards": _logged_rewards(rows)}
        with _damaged(self.path / HEALTH_SETTINGS):
            return {
                "rewards": [str(name) for name in settings.get("rewards", [])],
                "skipped": {str(name) for name in settings.get("skipped", [])},
                "bounds": {str(name): float(bound) for name, bound in settings.get("bounds", {}).items()},
                "weights": {str(name): float(weight) for name, weight in settings.get("weights", {}).items()},
            }

    def _json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty without the file."""
        return _object_in(self.path / name)

    def _rollout_entries(self) -> list[os.DirEntry[str]]:
        """Return the files of RolloutLog; other files, pipes and links out of the directory are left out."""
        folder = self.path / "rollouts"
        if not folder.is_dir() or not folder.resolve().is_relative_to(self.path.resolve()):
            return []
        with os.scandir(folder) as entries:
            named = [entry for entry in entries if re.fullmatch(ROLLOUT_FILE, entry.name)]
            return [
                entry for entry in named if entry.is_file() and (not entry.is_symlink() or self._has(Path(entry.path)))
            ]

    def rollout_files(self, kind: Literal["step", "validation"] = "step") -> dict[int, list[Path]]:
        """Return the files with the responses of each step or validation, one file for each rank, in order."""
        files: dict[int, list[Path]] = {}
        for path in sorted(Path(entry.path) for entry in self._rollout_entries()):
            match = re.fullmatch(ROLLOUT_FILE, path.name)
            if match is not None and match["kind"] == kind:
                files.setdefault(int(match["step"]), []).append(path)
        return dict(sorted(files.items()))

    def rollouts(self, step: int, kind: Literal["step", "validation"] = "step") -> list[dict[str, Any]]:
        """Return the responses of a step or validation; see :func:`read_responses`."""
        return read_responses(self.rollout_files(kind).get(step, []))

    def thumbnail(self, name: str) -> bytes | None:
        """Return the thumbnail of an image, a JPEG file of at most 64 KiB; None if RolloutLog has not written it.

        Args:
            name: name of its file, such as ``0123456789abcdef.jpg``; there is no file with another name.
        """
        path = self.path / "rollouts" / "images" / name
        if not re.fullmatch(THUMBNAIL, name):
            return None
        try:
            if not self._has(path):
                return None
            with path.open("rb") as file:
                data = file.read(_MAX_THUMBNAIL_BYTES + 1)
        except OSError:  # a page without the image is better than none
            return None
        if data.startswith(_JPEG) and len(data) <= _MAX_THUMBNAIL_BYTES:
            return data
        return None


def read_responses(files: Sequence[Path], tokens: bool = True) -> list[dict[str, Any]]:
    """Return the responses in files of RolloutLog; a line that is incomplete or damaged is ignored.

    Of more than 128 MiB, it returns the first responses, and logs a warning.

    Args:
        files: files of one step, of all ranks.
        tokens: whether the values of tokens are read, which are most of a file.
    """
    rows: list[dict[str, Any]] = []
    left = _MAX_ROLLOUT_BYTES
    for path in files:
        with _damaged(path), path.open("rb") as file:
            while line := file.readline(left + 1):
                left -= len(line)
                if left < 0:
                    log.warning(
                        "%s: the step has more than %d MiB of responses; those after the first %d are left out",
                        *(path, _MAX_ROLLOUT_BYTES >> 20, len(rows)),
                    )
                    return rows
                row = (None if tokens else _without_tokens(line)) or _response(line)
                if row is not None:
                    rows.append(row)
    return rows


def _without_tokens(line: bytes) -> dict[str, Any] | None:
    """Return the response of a line without its last value, that of tokens; None if that is not the last value."""
    start, values, rest = line.partition(_TOKENS)
    if values and rest.rstrip().endswith(b"]}}"):
        return _response(start + b"}")
    return None


def _response(line: bytes) -> dict[str, Any] | None:
    """Return the response of a line; None for a line that the run is writing, or that is damaged."""
    try:
        row = parsed(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    # Damaged or foreign files may have other values in the two that the pages group and compute by.
    if isinstance(row.get("group"), dict | list):
        row["group"] = as_json(row["group"])
    if not isinstance(row.get("reward", 0), int | float):
        row["reward"] = None
    return row


def _logged_rewards(rows: Sequence[tuple[int, dict[str, float]]]) -> list[str]:
    """Return the names of the reward functions whose metrics are in the first rows, without the environment.

    Environments of tools and agents often give no reward; then their reward is 0 by intention.
    """
    names = {name for _, row in rows[:8] for name in row if name.startswith("reward/") and name.endswith("_std")}
    return sorted(name[len("reward/") : -len("_std")] for name in names - {"reward/environment_std", "reward/std"})


def _is_inside(directory: Path, path: Path) -> bool:
    """Return whether a path is a regular file, and not a link out of the directory."""
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run's directory; empty without the file."""
    if not _is_inside(path.parent, path):
        return {}
    with _damaged(path):
        return _mapping(parsed(path.read_text(encoding="utf-8")))


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Convert errors of a file and of its content.

    Raises:
        UsageError: an error was raised; the message contains the path.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (csv.Error, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # messages of YAML have several lines
        raise UsageError(f"{path} cannot be read, the file is damaged: {type(error).__name__}: {reason}") from error


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"expected names with values, got {type(value).__name__}")
    return value


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all values of nested mappings and nested lists."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        for number, part in enumerate(value):
            yield from _flat(f"{name}.{number}", part)
    else:
        yield name, value
