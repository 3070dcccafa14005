"""The form of responses: their length, markup and repetition, and the prompts whose responses all have one form."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_rlhf.extras.records.values import number

_OPENING = 32  # characters
_PIECE = 8  # characters of a piece that may be repeated: more than a word and its blank
_LONGEST = 4000  # characters in which pieces are counted
_FEWEST_PROMPTS = 4  # different prompts, of which all responses with one text are no coincidence
_ROUNDING = 1e-12  # part of the squares that deviations from a mean have by rounding
_MARKUP = re.compile(r"^\s*(?:#{1,6}|[-*•]|\d+[.)]) |\*\*[^*\n]+\*\*|```|</?[a-z_]+>|\\boxed\{", re.MULTILINE)
ResponseRow = dict[str, Any]  # line of a file of RolloutLog


def text_of(row: ResponseRow) -> str:
    """Return what the policy wrote of a response."""
    segments = row.get("segments")
    if isinstance(segments, list):
        turns = [part for part in segments if isinstance(part, Mapping) and part.get("from") == "policy"]
        return "".join(str(turn.get("text", "")) for turn in turns)
    return str(row.get("response", ""))


def _length(row: ResponseRow) -> float:
    return number(row.get("response_tokens")) or 0.0


def _markup(row: ResponseRow) -> float:
    return float(len(_MARKUP.findall(text_of(row))))


def _repetition(row: ResponseRow) -> float:
    text = text_of(row)[:_LONGEST]
    count = len(text) - _PIECE + 1
    if count < 1:
        return 0.0
    return 1 - len({text[i : i + _PIECE] for i in range(count)}) / count


def _template(row: ResponseRow) -> str:
    """Return a text with a mark for each number and each word of the prompt."""
    words = {word.lower() for word in re.findall(r"\w+", str(row.get("prompt", "")))}

    def mark(match: re.Match[str]) -> str:
        word = match.group()
        return "_" if word.lower() in words or word.isdigit() else word

    return re.sub(r"\w+", mark, text_of(row))


MEASURES: dict[str, Callable[[ResponseRow], float]] = {
    "length": _length,
    "markup": _markup,
    "repetition": _repetition,
}
FORMS: dict[str, Callable[[ResponseRow], str]] = {
    "text": text_of,
    "opening": lambda row: text_of(row)[:_OPENING],
    "template": _template,
}


def form_metrics(rows: Sequence[ResponseRow]) -> dict[str, float]:
    """Return the metrics ``form/...`` of the responses of a step; NaN where they cannot be computed.

    Args:
        rows: responses as :class:`~lightning_rlhf.callbacks.RolloutLog` writes them.
    """
    metrics = {f"form/{name}_mean": _mean(map(MEASURES[name], rows)) for name in ("markup", "repetition")}
    rewarded = [row for row in rows if number(row.get("reward")) is not None and not row.get("truncated")]
    for name, measure in MEASURES.items():
        metrics[f"form/{name}_correlation"] = _correlation(rewarded, measure)
    groups = [group for group in groups_of(rows) if len(group) > 1]
    for name, form in FORMS.items():
        metrics[f"form/same_{name}_fraction"] = _mean(float(has_one(form, group)) for group in groups)
    several = len({str(row.get("prompt")) for row in rows}) >= _FEWEST_PROMPTS
    metrics["form/common_text_fraction"] = common_text(rows)[1] / len(rows) if several else math.nan
    return metrics


def groups_of(rows: Sequence[ResponseRow]) -> list[list[ResponseRow]]:
    """Return the responses to each prompt."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.get("group")].append(row)
    return list(groups.values())


def has_one(form: Callable[[ResponseRow], str], group: Sequence[ResponseRow]) -> bool:
    """Return whether all responses of a group have the same form."""
    return len(set(map(form, group))) == 1


def common_text(rows: Sequence[ResponseRow]) -> tuple[str, int]:
    """Return the most frequent text of responses, and their number."""
    counts = Counter(map(text_of, rows)).most_common(1)
    return counts[0] if counts else ("", 0)


def _mean(values: Iterable[float]) -> float:
    known = [*values]
    return fmean(known) if known else math.nan


def _correlation(rows: Sequence[ResponseRow], measure: Callable[[ResponseRow], float]) -> float:
    """Return Pearson's correlation of reward and measure, both minus their means over the responses to the prompt.

    If each prompt has one response, the means are those of all responses.
    """
    groups = [group for group in groups_of(rows) if len(group) > 1] or [list(rows)]
    rewards = _deviations([[number(row.get("reward")) or 0.0 for row in group] for group in groups])
    values = _deviations([[measure(row) for row in group] for group in groups])
    squares = _dot(rewards, rewards) * _dot(values, values)
    return _dot(rewards, values) / math.sqrt(squares) if squares else math.nan


def _deviations(groups: Sequence[Sequence[float]]) -> list[float]:
    """Return the values minus the means of their groups; all 0 if they differ by rounding alone."""
    deviations = [value - fmean(group) for group in groups for value in group]
    total = sum(value * value for group in groups for value in group)
    return deviations if _dot(deviations, deviations) > _ROUNDING * total else [0.0] * len(deviations)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
