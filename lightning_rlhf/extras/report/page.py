"""The report page: one HTML file with the curves, health checks and responses of runs, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from lightning_rlhf.callbacks.records.run_files import THUMBNAIL
from lightning_rlhf.callbacks.records.run_history import VALIDATION_MARK, Row, is_validation
from lightning_rlhf.extras.health.evidence import SHOWN_BY, responses_of
from lightning_rlhf.extras.health.monitor import Finding
from lightning_rlhf.extras.records.values import as_json, number, rounded
from lightning_rlhf.extras.report.definitions import definitions
from lightning_rlhf.extras.report.run_directory import RunDirectory, read_responses

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("uPlot.iife.min.js", "common.js", "texts.js", "charts.js", "prompts.js", "report.js")  # in this order
_LIVE_SCRIPTS = ("diff.js", "tokens.js", "viewer.js")  # after those
_SAMPLES = 12  # responses of a step on the page, and prompts whose answers are on it
_LONGEST_TEXT = 20_000  # characters of a text on the page
_LONGEST_PROMPT = 1000  # characters of the prompt of a group
_MOST_IMAGES = 16  # of a prompt on the page
_MOST_IMAGE_BYTES = 2_000_000  # of all thumbnails on the page; of other images it has the sizes
_NUMBERS = ("advantage", "kl", "response_tokens", "turns", "tool_calls", "index", "group")  # of a response
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def report_page(runs: Sequence[RunDirectory], live: bool = False) -> str:
    """Return the HTML of the report of one or more runs.

    Args:
        runs: at least one run.
        live: whether the page is that of the inspector, which gets new data and responses from its server.
    """
    return html_page(page_data(runs, live), (*_SCRIPTS, *(_LIVE_SCRIPTS if live else ())), live)


def page_data(runs: Sequence[RunDirectory], live: bool = False) -> dict[str, Any]:
    """Return the data of the page: that of each run, and units and meanings of their metrics.

    Args:
        runs: at least one run.
        live: whether the page is that of the inspector.
    """
    data = run_data(runs, live)
    names = {name for run in data for table in ("training", "validation") for name in run[table]} - {"step"}
    return {"runs": data, "definitions": definitions(sorted(names))}


def html_page(data: dict[str, Any], scripts: Sequence[str], live: bool) -> str:
    """Return the HTML of a page.

    Scripts and styles are allowed by their hashes, and texts of models are data, which scripts write as text.

    Args:
        data: data that the scripts show.
        scripts: names of the files with the scripts, in order.
        live: whether the page is that of the inspector.
    """
    data_text = as_json(data).replace("<", "\\u003c")
    codes = [(_ASSETS / name).read_text(encoding="utf-8") for name in scripts]
    styles = [(_ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")]
    policy = (
        f"default-src 'none'; script-src {_hashes(codes)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    policy += "; connect-src 'self'" if live else ""
    head = "".join(f"<style>{style}</style>\n" for style in styles)
    tail = "".join(f"<script>{code}</script>\n" for code in codes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lightning-rlhf {'inspect' if live else 'report'}</title>\n{head}</head>\n"
        f"<body data-live={'yes' if live else 'no'}>\n"
        '<main id="page"></main>\n'
        f'<script type="application/json" id="data">{data_text}</script>\n{tail}</body>\n</html>\n'
    )


def _hashes(texts: Sequence[str]) -> str:
    """Return the sources of a content security policy that allow these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def run_data(runs: Sequence[RunDirectory], live: bool = False) -> list[dict[str, Any]]:
    """Return the data of the page for each run, as plain values; runs with equal names get longer parts of their paths.

    Args:
        runs: at least one run.
        live: whether the page gets the responses of validations from a server, so that the data has none.
    """
    paths = [run.path.resolve() for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        parent = os.path.commonpath([path.parent for path in paths])
        names = [path.relative_to(parent).as_posix() for path in paths]
    return [
        {
            "name": name,
            "path": str(run.path),
            **run.state(),
            **_data_of(run, 0 if live else _MOST_IMAGE_BYTES // len(runs), live, run.signature()),
        }
        for run, name in zip(runs, names, strict=True)
    ]


@lru_cache(maxsize=32)
def _data_of(run: RunDirectory, image_bytes: int, live: bool, signature: tuple[Any, ...]) -> dict[str, Any]:
    """Return the data of a run whose files have this signature, without its state.

    Args:
        image_bytes: largest number of bytes of its thumbnails in the data.
        live: whether the page gets the responses of validations from a server.
        signature: its signature.
    """
    rows = run.rows()
    failed = run.findings(rows)
    findings = [{**asdict(finding), "responses": shown_by(finding, run)} for finding in failed]
    files, validations = run.rollout_files(), run.rollout_files("validation")
    steps = list(files)
    ends = {step: read_responses(files[step], tokens=False) for step in sorted({*steps[:1], *steps[-1:]})}
    samples = [{"step": step, "rows": samples_of(responses)} for step, responses in ends.items()]
    answers = [] if live else answers_of(validations)
    shown = [row for part in (*samples[::-1], *answers) for row in part["rows"]]  # the newest responses first
    shown += [row for finding in findings for row in finding["responses"]]
    training, validation = split_rows(rows)
    return {
        "training": _columns(training),
        "validation": _columns(validation),
        "findings": findings,
        "checks": run.checks(rows, failed),
        "config": setting_texts(run.config()),
        "environment": run.environment(),
        "rewards": [reward_quantiles(step, paths) for step, paths in files.items()],
        "groups": groups_of(ends[steps[-1]]) if steps else [],
        "samples": samples,
        "validations": list(validations),
        **({} if live else {"answers": answers, "thumbnails": _thumbnails_of(run, shown, image_bytes)}),
    }


def shown_by(finding: Finding, run: RunDirectory) -> list[dict[str, Any]]:
    """Return the responses of a step that show a finding; none without a file of the step."""
    if finding.check not in SHOWN_BY:
        return []
    rows = read_responses(run.rollout_files().get(finding.step, []), tokens=False)
    return [_sample(row) for row in responses_of(finding.check, finding.metric, rows)]


def split_rows(rows: Sequence[tuple[int, Row]]) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    """Return the rows of training steps, and those of validations with names that begin with ``val/``.

    Args:
        rows: step and metrics of each row of ``metrics.csv``.
    """
    training: list[tuple[int, Row]] = []
    validation: list[tuple[int, Row]] = []
    for step, row in rows:
        if any(is_validation(name) for name in row):
            validation.append((step, _validation_names(row)))
        else:
            training.append((step, row))
    return training, validation


def _validation_names(row: Row) -> Row:
    """Return the metrics of a validation with names that begin with ``val/``, which a user's metrics may not have."""
    named = {f"val/{name}": value for name, value in row.items() if not is_validation(name)}
    return named | {name: value for name, value in row.items() if is_validation(name) and name != VALIDATION_MARK}


def _columns(rows: list[tuple[int, Row]]) -> dict[str, list[float | None]]:
    """Return the values of each metric to six digits; None where a row lacks it."""
    names = sorted({name for _, row in rows for name in row})
    return {
        "step": [step for step, _ in rows],
        **{name: [rounded(row.get(name)) for _, row in rows] for name in names},
    }


def setting_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a configuration as texts."""
    return {k: value if isinstance(value, str) else json.dumps(value, default=str) for k, value in config.items()}


def reward_quantiles(step: int, files: Sequence[Path]) -> dict[str, Any]:
    """Return the step, and quantiles (least, 10, 25, 50, 75, 90 %, largest) of the rewards in its files."""
    changed = tuple((path, path.stat().st_mtime_ns) for path in files)
    return {"step": step, "quantiles": _quantiles(changed)}


@lru_cache(maxsize=1 << 16)
def _quantiles(files: tuple[tuple[Path, int], ...]) -> list[float]:
    """Return the quantiles of the rewards in files that were changed at these times."""
    rewards = sorted(_rewards(read_responses([path for path, _ in files], tokens=False)))
    positions = []
    if rewards:
        positions = [quantile * (len(rewards) - 1) for quantile in _QUANTILES]
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
        prompt = shortened("prompt", group[0].get("prompt", ""), _LONGEST_PROMPT)
        if rewards := _rewards(group):
            result.append({**prompt, "mean": statistics.fmean(rewards), "rewards": sorted(rewards)})
    return sorted(result, key=lambda group: -group["mean"])


def samples_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return responses that are equally spaced from the best to the worst reward; those without a reward are last."""
    ranked = sorted(rows, key=lambda row: -next(iter(_rewards([row])), -math.inf))
    count = min(_SAMPLES, len(ranked))
    chosen = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
    return [_sample(row) for row in chosen]


def answers_of(validations: dict[int, list[Path]]) -> list[dict[str, Any]]:
    """Return step and responses of the first and the last validation, for the same prompts.

    Args:
        validations: files of each validation.
    """
    steps = list(validations)
    ends = {step: read_responses(validations[step]) for step in sorted({*steps[:1], *steps[-1:]})}
    rows = {
        step: {index: row for row in responses if (index := number(row.get("index"))) is not None}
        for step, responses in ends.items()
    }
    if rows:
        common = set.intersection(*(set(responses) for responses in rows.values()))
    else:
        common = set()
    chosen = sorted(common)[:_SAMPLES]
    return [{"step": step, "rows": [_sample(responses[index]) for index in chosen]} for step, responses in rows.items()]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a response that the page shows."""
    texts: dict[str, Any] = {}
    for name in ("prompt", "response", "ground_truth"):
        texts |= shortened(name, row.get(name, ""))
    segments = [
        {"from": str(part.get("from")), **shortened("text", part.get("text")), "reward": number(part.get("reward"))}
        for part in _as(list, row.get("segments"))
        if isinstance(part, dict)
    ]
    return {
        **texts,
        **_images_of(row),
        "segments": segments,
        "reward": number(row.get("reward")),
        "rewards": {name: number(value) for name, value in _as(dict, row.get("rewards")).items()},
        "truncated": bool(row.get("truncated")) or row.get("stop") == "length",
        **{name: number(row[name]) for name in _NUMBERS if name in row},
        **({"stop": str(row["stop"])} if "stop" in row else {}),
    }


def _images_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the first images of a response's prompt, and the number of the others; nothing without images.

    An image has the ``file`` of its thumbnail, None for a value that RolloutLog does not write, and its sizes.
    """
    images = [image for image in _as(list, row.get("images")) if isinstance(image, dict)]
    shown = [
        {"file": _file_of(image), "width": number(image.get("width")), "height": number(image.get("height"))}
        for image in images[:_MOST_IMAGES]
    ]
    left_out = len(images) - len(shown)
    return {**({"images": shown} if shown else {}), **({"images_left_out": left_out} if left_out else {})}


def _file_of(image: dict[str, Any]) -> str | None:
    """Return the file of an image's thumbnail; None for a value that is not a name of such a file."""
    file = image.get("file")
    if isinstance(file, str) and re.fullmatch(f"images/{THUMBNAIL}", file):
        return file
    return None


def _thumbnails_of(run: RunDirectory, rows: Iterable[dict[str, Any]], most: int) -> dict[str, str]:
    """Return the thumbnails of the images of responses as ``data:`` URLs, by their files.

    Args:
        rows: responses of the page; those of the first ones have precedence.
        most: largest number of bytes of all of them.
    """
    files = dict.fromkeys(image["file"] for row in rows for image in row.get("images", ()) if image["file"])
    urls = {}
    for file in files:
        data = run.thumbnail(file.removeprefix("images/"))
        url = f"data:image/jpeg;base64,{base64.b64encode(data or b'').decode()}"
        if data is not None and len(url) <= most:
            urls[file] = url
            most -= len(url)
    return urls


def shortened(name: str, value: Any, longest: int = _LONGEST_TEXT) -> dict[str, Any]:
    """Return a text by its name; if it is longer than ``longest``, without its middle, and the number left out.

    Args:
        name: name of the text.
        value: text, or another value of the data.
        longest: most characters of beginning and end.
    """
    text = str(value)
    left_out = len(text) - longest
    if left_out <= 0:
        return {name: text}
    mark = f"\n… {left_out:,} characters left out, see lightning-rlhf inspect …\n"
    half = longest // 2
    return {name: f"{text[:half]}{mark}{text[-half:]}", f"{name}_left_out": left_out}


def _rewards(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the rewards of responses; those that are not finite numbers are left out."""
    return [reward for row in rows if (reward := number(row.get("reward"))) is not None]


def _as(kind: type[_Kind], value: Any) -> _Kind:
    """Return a value of a type; an empty one instead of a value of another type."""
    if isinstance(value, kind):
        return value
    return kind()
