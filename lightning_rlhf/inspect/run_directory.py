"""Reading the directory of a run: metrics, configuration, environment, rollouts."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.inspect.health import Finding, HealthMonitor

_VALIDATION = "val/"


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics; an incomplete last line is ignored."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def is_validation(metric: str) -> bool:
    """Return whether a metric is of a validation."""
    return metric.startswith(_VALIDATION)


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may continue while it is read.

    Args:
        path: directory with ``metrics.csv``.

    Raises:
        UsageError: there is no ``metrics.csv``.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / "metrics.csv").is_file():
            raise UsageError(
                f"{self.path} is not the directory of a run, because it has no metrics.csv: expected the "
                "default_root_dir of a run"
            )

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return the step and the metrics of each row of ``metrics.csv``, without missing values and NaN."""
        rows = []
        for row in read_metrics(self.path / "metrics.csv"):
            values = {name: float(text) for name, text in row.items() if text and name != "step"}
            rows.append((int(row["step"]), {k: v for k, v in values.items() if math.isfinite(v)}))
        return rows

    def config(self) -> dict[str, Any]:
        """Return the values of ``config.yaml`` by dotted names; empty without the file."""
        path = self.path / "config.yaml"
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        return dict(_flat("", content)) if isinstance(content, dict) else {}

    def environment(self) -> dict[str, Any]:
        """Return ``env.json``: command, Python, packages and devices; empty without the file."""
        path = self.path / "env.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def findings(self) -> list[Finding]:
        """Return the health checks that fail for the metrics."""
        rows = self.rows()
        names = {name for _, row in rows[:8] for name in row}
        rewards = [name[len("reward/") : -len("_std")] for name in names if _is_reward_spread(name)]
        monitor = HealthMonitor(sorted(rewards))
        for step, row in rows:
            monitor.add(step, row)
        return monitor.findings

    def rollout_steps(self) -> list[int]:
        """Return the steps whose responses ``RolloutLog`` wrote, in order."""
        return sorted({int(path.stem.split("-")[1]) for path in (self.path / "rollouts").glob("step-*.jsonl")})

    def rollout_files(self, step: int) -> list[Path]:
        """Return the files with the responses of a step, one for each rank."""
        return sorted((self.path / "rollouts").glob(f"step-{step:06d}*.jsonl"))

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the responses of a step, of all ranks; an incomplete last line is ignored."""
        rows = []
        for path in self.rollout_files(step):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the run is writing this line
                    continue
                if isinstance(row, dict):
                    rows.append(row)
        return rows


def _is_reward_spread(name: str) -> bool:
    # Tools and agents often give no reward; then the environment's reward is 0 by intention.
    return name.startswith("reward/") and name.endswith("_std") and name not in ("reward/std", "reward/environment_std")


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all values of nested mappings and of lists of mappings."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for number, part in enumerate(value):
            yield from _flat(f"{name}.{number}", part)
    else:
        yield name, value
