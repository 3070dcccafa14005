"""A folder of runs as a table: their states, settings, first and last metrics, and groups of seeds."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks.records.run_files import RUN_END
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.records.values import rounded
from lightning_rlhf.extras.report.definitions import definitions
from lightning_rlhf.extras.report.page import html_page, setting_texts, split_rows
from lightning_rlhf.extras.report.run_directory import RunDirectory, end_state

_DEEPEST = 5  # levels of directories below the folder
_MOST_RUNS = 500
_SEED = "seed_everything"
_DIRECTORY = "trainer.default_root_dir"
_EMPTY_ROW: dict[str, Any] = {
    "modified": 0.0, "steps": 0, "limit": None, "seed": None, "failed_checks": 0, "config": {}, "first": {}, "last": {},
    "link": "",
}  # row of a run without metrics, or with a damaged file  # fmt: skip


def is_folder_of_runs(path: Path) -> bool:
    """Return whether a path is a directory without metrics.csv, but with runs below it."""
    return path.is_dir() and not (path / "metrics.csv").exists() and next(_run_paths(path), None) is not None


def find_runs(folder: Path) -> list[RunDirectory]:
    """Return the runs below a folder, at most 500 and at most 5 levels deep, sorted by name.

    It does not follow links, and does not look for runs inside of runs.
    """
    return [RunDirectory(path) for path in islice(_run_paths(folder), _MOST_RUNS)]


def _run_paths(folder: Path, name: str = "metrics.csv") -> Iterator[Path]:
    """Yield a folder and the directories below it that contain a file with this name; not those inside of runs."""
    for path, folders, files in os.walk(folder):
        depth = len(Path(path).relative_to(folder).parts)
        if name in files and (Path(path) / name).is_file() and not (Path(path) / name).is_symlink():
            yield Path(path)
        is_run = "metrics.csv" in files and (Path(path) / "metrics.csv").is_file()
        folders[:] = [] if is_run or depth == _DEEPEST else sorted(folders)


def _without_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return rows for the runs below a folder that ended before their first metrics."""
    ended = islice((path for path in _run_paths(folder, RUN_END) if not (path / "metrics.csv").exists()), _MOST_RUNS)
    rows = []
    for path in ended:
        try:
            state = end_state(path)
        except UsageError as error:
            state = {"state": "damaged", "error": str(error)}
        rows.append(
            {**_EMPTY_ROW, **state, "name": path.relative_to(folder).as_posix(), "group": str(path)}
        )  # a group of one
    return rows


def project_page(folder: Path, runs: Sequence[RunDirectory], links: Sequence[str], live: bool = False) -> str:
    """Return the HTML of the table of runs.

    Args:
        folder: folder of the runs.
        runs: runs below it.
        links: address of the page of each run, relative to this page; empty without one.
        live: whether the page is that of the inspector.
    """
    return html_page(project_data(folder, runs, links), ("common.js", "project.js"), live)


def project_data(folder: Path, runs: Sequence[RunDirectory], links: Sequence[str]) -> dict[str, Any]:
    """Return the data of the table of runs, as plain values.

    Runs whose settings are equal, except for seed and directory, have the same ``group``. A run that cannot be read has
    the state ``damaged``. Runs that ended before their first metrics are the last ones.

    Args:
        folder: folder of the runs.
        runs: runs below it.
        links: address of the page of each run, relative to this page; empty without one.
    """
    groups: dict[str, int] = {}
    rows = []
    for run, link in zip(runs, links, strict=True):
        row = _row(run)
        settings = json.dumps(row["config"], sort_keys=True)
        is_known = bool(row["config"])  # a run without config.yaml is a group of one
        group = groups.setdefault(settings if is_known else str(run.path), len(groups))
        rows.append({"name": run.path.relative_to(folder).as_posix(), **row, "link": link, "group": group})
    names = sorted({name for row in rows for name in row["last"]})
    rows += _without_metrics(folder)
    return {"project": {"path": str(folder), "runs": rows}, "definitions": definitions(names)}


def _row(run: RunDirectory) -> dict[str, Any]:
    """Return state, settings and metrics of a run."""
    try:
        return {**run.state(), **_summary(run, run.signature(responses=False))}
    except (UsageError, OSError) as error:
        return {**_EMPTY_ROW, "state": "damaged", "error": str(error)}


@lru_cache(maxsize=2 * _MOST_RUNS)
def _summary(run: RunDirectory, signature: tuple[Any, ...]) -> dict[str, Any]:
    """Return settings and metrics of a run whose files have this signature."""
    rows = run.rows()
    training, validation = split_rows(rows)
    config = run.config()
    first: dict[str, float | None] = {}
    last: dict[str, float | None] = {}
    count = Counter[str]()
    for _, row in (*training, *validation):
        for name, value in row.items():
            first.setdefault(name, rounded(value))
            last[name] = rounded(value)
            count[name] += 1
    limit = config.get("trainer.max_steps")
    return {
        "steps": training[-1][0] if training else 0,
        "limit": limit if isinstance(limit, int) and limit > 0 else None,
        "seed": config.get(_SEED),
        "config": _settings(config),
        "first": {name: value for name, value in first.items() if count[name] > 1},
        "last": last,
        "failed_checks": len(run.findings(rows)),
    }


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run without its seed and without paths in its directory."""
    directory = str(config.get(_DIRECTORY) or "").rstrip("/")
    texts = {name: text for name, text in setting_texts(config).items() if name not in (_SEED, _DIRECTORY)}
    prefixes = (directory, f"{directory}/")
    return {
        k: text
        for k, text in texts.items()
        if not directory or (text != prefixes[0] and not text.startswith(prefixes[1]))
    }
