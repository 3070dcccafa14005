"""Files of a run's directory that several callbacks write or read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from lightning_rlhf.callbacks.records.run_history import is_validation

HEALTH_SETTINGS = "health_settings.json"  # written by HealthChecks
RUN_END = "end.json"  # written by ReportPage when a run ends
ROLLOUT_FILE = r"(?P<kind>step|validation)-(?P<step>[0-9]{6,9})(-rank[0-9]{1,6})?\.jsonl"  # written by RolloutLog
THUMBNAIL = r"[0-9a-f]{16}\.jpg"  # written by RolloutLog, in the directory images next to those files


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics; an incomplete last line is ignored."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def precedes(row: Mapping[str, str], step: int) -> bool:
    """Return whether a row was written before a checkpoint of ``step``; a validation that was due runs again."""
    names = [name for name, value in row.items() if value and name != "step"]
    is_training = bool(names) and not any(is_validation(name) for name in names)
    if is_training or step == 0:
        return int(row["step"]) <= step
    return int(row["step"]) < step
