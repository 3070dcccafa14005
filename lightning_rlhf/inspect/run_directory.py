"""Reading the directory of a run: metrics, configuration, environment, rollouts."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.inspect.health import Finding, HealthMonitor

log = logging.getLogger(__name__)
HEALTH_SETTINGS = "health.json"  # written by HealthChecks
RUN_END = "end.json"  # written by ReportPage when a run ends
_VALIDATION = "val/"
_MAX_SETTINGS = 100_000  # of a configuration; aliases of YAML can make a small file endless
_MAX_ROLLOUT_BYTES = 128 << 20  # of the responses of a step; a page with more is too slow to use


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics; an incomplete last line is ignored."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def is_validation(metric: str) -> bool:
    """Return whether a metric is of a validation."""
    return metric.startswith(_VALIDATION)


def precedes(row: Mapping[str, str], step: int) -> bool:
    """Return whether a row was written before a checkpoint of ``step``; a validation that was due runs again."""
    has_training = any(value for name, value in row.items() if name != "step" and not is_validation(name))
    return int(row["step"]) <= step if has_training or step == 0 else int(row["step"]) < step


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may continue while it is read.

    Args:
        path: directory with ``metrics.csv``.

    Raises:
        UsageError: the path is not a directory with ``metrics.csv``.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            fault = "is not a directory" if self.path.exists() else "does not exist"
            raise UsageError(f"{self.path} {fault}: expected the directory of a run, its default_root_dir")
        if not (self.path / "metrics.csv").is_file():
            below = sorted(str(path.parent) for path in self.path.glob("*/metrics.csv"))
            runs = f"; runs below it: {', '.join(below[:8])}" if below else ""
            raise UsageError(
                f"{self.path} has no metrics.csv, which a run writes when training begins: expected the "
                f"default_root_dir of a run{runs}"
            )

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
        """Return the values of ``config.yaml`` by dotted names; empty without the file."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        with _damaged(path):
            return dict(islice(_flat("", _mapping(yaml.safe_load(path.read_text(encoding="utf-8")))), _MAX_SETTINGS))

    def environment(self) -> dict[str, Any]:
        """Return ``env.json``: command, Python, packages and devices; empty without the file."""
        return self._json("env.json")

    def state(self) -> dict[str, Any]:
        """Return whether the run has ended.

        Returns:
            ``state`` is ``ended``, ``failed``, or ``running`` without the file that ReportPage writes at the end, which
            a killed run lacks too; ``error`` is that of a failed run; ``seconds`` have passed since the last metrics.
        """
        end = self._json(RUN_END)
        error = str(end.get("error") or "")
        state = "running" if not end else "failed" if error else "ended"
        age = time.time() - (self.path / "metrics.csv").stat().st_mtime
        return {"state": state, "error": error, "seconds": max(0.0, round(age))}

    def findings(self) -> list[Finding]:
        """Return the health checks that fail for the metrics.

        The callback HealthChecks wrote which ones apply; without its file, all checks and logged rewards do.
        """
        rows = self.rows()
        settings = self._json(HEALTH_SETTINGS) or {"rewards": _logged_rewards(rows)}
        with _damaged(self.path / HEALTH_SETTINGS):
            monitor = HealthMonitor(
                rewards=[str(name) for name in settings.get("rewards", [])],
                skipped={str(name) for name in settings.get("skipped", [])},
                bounds={str(name): float(bound) for name, bound in settings.get("bounds", {}).items()},
            )
        for step, row in rows:
            monitor.add(step, row)
        return monitor.findings

    def _json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty without the file."""
        path = self.path / name
        if not path.is_file():
            return {}
        with _damaged(path):
            return _mapping(json.loads(path.read_text(encoding="utf-8")))

    def rollout_steps(self) -> list[int]:
        """Return the steps whose responses ``RolloutLog`` wrote, in order."""
        return sorted({int(path.stem.split("-")[1]) for path in (self.path / "rollouts").glob("step-*.jsonl")})

    def rollout_files(self, step: int) -> list[Path]:
        """Return the files with the responses of a step, one for each rank."""
        return sorted((self.path / "rollouts").glob(f"step-{step:06d}*.jsonl"))

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the responses of a step, of all ranks; an incomplete last line is ignored.

        Of more than 128 MiB, it returns the first responses, and logs a warning.
        """
        rows: list[dict[str, Any]] = []
        left = _MAX_ROLLOUT_BYTES
        for path in self.rollout_files(step):
            with path.open("rb") as file:
                while line := file.readline(left + 1):
                    left -= len(line)
                    if left < 0:
                        log.warning(
                            "%s: step %d has more than %d MiB of responses; those after the first %d are left out",
                            *(self.path, step, _MAX_ROLLOUT_BYTES >> 20, len(rows)),
                        )
                        return rows
                    try:
                        row = json.loads(line.decode("utf-8", "replace"))
                    except ValueError:  # the run is writing this line
                        continue
                    if isinstance(row, dict):
                        rows.append(row)
        return rows


def _logged_rewards(rows: list[tuple[int, dict[str, float]]]) -> list[str]:
    """Return the names of the reward functions whose metrics are in the first rows, without the environment.

    Environments of tools and agents often give no reward; then their reward is 0 by intention.
    """
    names = {name for _, row in rows[:8] for name in row if name.startswith("reward/") and name.endswith("_std")}
    return sorted(name[len("reward/") : -len("_std")] for name in names - {"reward/environment_std", "reward/std"})


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Convert errors of a file's content.

    Raises:
        UsageError: an error was raised; the message contains the path.
    """
    try:
        yield
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
