"""The report page: one HTML file with the curves, health checks and responses of runs, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from lightning_rlhf.inspect.run_directory import RunDirectory, is_validation

_ASSETS = Path(__file__).parent / "assets"
_SAMPLES = 12  # responses of a step on the page
_LONGEST_TEXT = 4000  # characters of a text on the page
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def report_page(runs: Sequence[RunDirectory], live: bool = False) -> str:
    """Return the HTML of the report of one or more runs.

    Scripts and styles are allowed by their hashes, and texts of models are data, which scripts write as text.

    Args:
        runs: at least one run.
        live: whether the page is that of the inspector, which gets new data and responses from its server.
    """
    data = as_json({"runs": run_data(runs)}).replace("<", "\\u003c")
    names = ("uPlot.iife.min.js", "common.js", "texts.js", "charts.js", "prompts.js", "report.js")
    names += ("diff.js", "tokens.js", "viewer.js") if live else ()
    scripts = [(_ASSETS / name).read_text(encoding="utf-8") for name in names]
    styles = [(_ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    policy += "; connect-src 'self'" if live else ""
    head = "".join(f"<style>{style}</style>\n" for style in styles)
    tail = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lightning-rlhf {'inspect' if live else 'report'}</title>\n{head}</head>\n"
        f"<body data-live={'yes' if live else 'no'}>\n"
        '<main id="page"></main>\n'
        f'<script type="application/json" id="data">{data}</script>\n{tail}</body>\n</html>\n'
    )


def as_json(value: Any) -> str:
    """Return valid JSON: NaN and infinite numbers become null, halves of surrogate pairs question marks."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _hashes(texts: Sequence[str]) -> str:
    """Return the sources of a content security policy that allow these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def run_data(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """Return the data of the page for each run, as plain values; runs with equal names get their paths as names."""
    names = [run.path.resolve().name for run in runs]
    return [
        {"name": name if names.count(name) == 1 else str(run.path), "path": str(run.path), **_data_of(run)}
        for run, name in zip(runs, names, strict=True)
    ]


def _data_of(run: RunDirectory) -> dict[str, Any]:
    rows = run.rows()
    steps = run.rollout_steps()
    return {
        **run.state(),
        "training": _columns([(step, row) for step, row in rows if not _of_validation(row)]),
        "validation": _columns([(step, row) for step, row in rows if _of_validation(row)]),
        "findings": [asdict(finding) for finding in run.findings()],
        "config": {name: _shown(value) for name, value in run.config().items()},
        "environment": run.environment(),
        "rewards": [reward_quantiles(run, step) for step in steps],
        "groups": groups_of(run.rollouts(steps[-1])) if steps else [],
        "samples": [
            {"step": step, "rows": samples_of(run.rollouts(step))} for step in sorted({*steps[:1], *steps[-1:]})
        ],
    }


def _of_validation(row: dict[str, float]) -> bool:
    return any(is_validation(name) for name in row)


def _columns(rows: list[tuple[int, dict[str, float]]]) -> dict[str, list[float | None]]:
    """Return the values of each metric to six digits; None where a row lacks it."""
    names = sorted({name for _, row in rows for name in row})
    return {
        "step": [step for step, _ in rows],
        **{name: [_rounded(row.get(name)) for _, row in rows] for name in names},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def reward_quantiles(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return the step, and quantiles (least, 10, 25, 50, 75, 90 %, largest) of the logged rewards of its responses."""
    changed = tuple(path.stat().st_mtime_ns for path in run.rollout_files(step))
    return {"step": step, "quantiles": _quantiles(run, step, changed)}


@lru_cache(maxsize=1 << 16)
def _quantiles(run: RunDirectory, step: int, changed: tuple[int, ...]) -> list[float]:
    """Return the quantiles of the rewards in files that were changed at these times."""
    rewards = sorted(_rewards(run.rollouts(step)))
    positions = [quantile * (len(rewards) - 1) for quantile in _QUANTILES] if rewards else []
    return [_between(rewards, position) for position in positions]


def _between(values: list[float], position: float) -> float:
    """Return the value of sorted values at a position, interpolated linearly."""
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])


def groups_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt, mean and sorted rewards of each prompt's responses, the best prompt first."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.get("group")].append(row)
    result = []
    for group in groups.values():
        text = str(group[0].get("prompt", ""))[-_LONGEST_TEXT:]
        if rewards := _rewards(group):
            result.append({"prompt": text, "mean": statistics.fmean(rewards), "rewards": sorted(rewards)})
    return sorted(result, key=lambda group: -group["mean"])


def samples_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return responses that are equally spaced from the best to the worst reward; those without a reward are last."""
    ranked = sorted(rows, key=lambda row: -next(iter(_rewards([row])), -math.inf))
    count = min(_SAMPLES, len(ranked))
    chosen = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
    return [_sample(row) for row in chosen]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a response that the page shows."""
    texts = {name: str(row.get(name, ""))[-_LONGEST_TEXT:] for name in ("prompt", "response", "ground_truth")}
    segments = [
        {
            "from": str(part.get("from")),
            "text": str(part.get("text"))[-_LONGEST_TEXT:],
            "reward": _number(part.get("reward")),
        }
        for part in _as(list, row.get("segments"))
        if isinstance(part, dict)
    ]
    rewards = {name: _number(value) for name, value in _as(dict, row.get("rewards")).items()}
    return {
        **texts,
        "segments": segments,
        "reward": _number(row.get("reward")),
        "rewards": rewards,
        "truncated": bool(row.get("truncated")),
    }


def _rewards(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the rewards of responses; those that are not finite numbers are left out."""
    return [reward for row in rows if (reward := _number(row.get("reward"))) is not None]


def _number(value: Any) -> float | None:
    """Convert a number of a rollout file; None for values that are not finite numbers."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def _as(kind: type[_Kind], value: Any) -> _Kind:
    """Return a value of a type; an empty one instead of a value of another type."""
    return value if isinstance(value, kind) else kind()
