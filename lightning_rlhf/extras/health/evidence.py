"""The responses that show a finding about an exploited reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_rlhf.extras.health.forms import FORMS, MEASURES, ResponseRow, common_text, groups_of, has_one, text_of
from lightning_rlhf.extras.records.values import number

_MOST = 4  # responses that show a finding


def responses_of(check: str, metric: str, rows: Sequence[ResponseRow]) -> list[ResponseRow]:
    """Return at most four responses that show a finding.

    Args:
        check: name of the check, one of :data:`SHOWN_BY`.
        metric: metric of the finding.
        rows: responses of its step, as :class:`~lightning_rlhf.callbacks.RolloutLog` writes them.
    """
    return SHOWN_BY[check](metric, rows)[:_MOST]


def _of_second_reward(metric: str, rows: Sequence[ResponseRow]) -> list[ResponseRow]:
    """Return those whose reward has a high rank, and whose second reward has a low one."""
    name = metric.partition("/")[2].removesuffix("_sampled" if metric.startswith("val/") else "")
    pairs = [(number(row.get("reward")), number(_rewards(row).get(name)), row) for row in rows]
    both = [(reward, second, row) for reward, second, row in pairs if reward is not None and second is not None]
    rewards, seconds = [reward for reward, *_ in both], [second for _, second, _ in both]
    both.sort(key=lambda each: _rank(each[1], seconds) - _rank(each[0], rewards))
    return _with_different_texts(row for *_, row in both)


def _of_form(metric: str, rows: Sequence[ResponseRow]) -> list[ResponseRow]:
    """Return those with most and least of a measure, of the prompts whose rewards differ most."""
    measure = MEASURES[metric.removeprefix("form/").removesuffix("_correlation")]
    rewarded = [row for row in rows if number(row.get("reward")) is not None]
    groups = [sorted(group, key=measure) for group in groups_of(rewarded) if len(group) > 1]
    groups.sort(key=_spread, reverse=True)
    return [row for group in groups or [sorted(rewarded, key=measure)] for row in group[-1:] + group[:1]]


def _of_one_form(metric: str, rows: Sequence[ResponseRow]) -> list[ResponseRow]:
    """Return two responses to each of two prompts, or those to different prompts that have the same text."""
    name = metric.removeprefix("form/same_").removesuffix("_fraction")
    if name not in FORMS:
        text, _ = common_text(rows)
        return list({str(row.get("prompt")): row for row in rows if text_of(row) == text}.values())
    groups = [group for group in groups_of(rows) if len(group) > 1 and has_one(FORMS[name], group)]
    return [row for group in groups for row in group[:2]]


SHOWN_BY: dict[str, Callable[[str, Sequence[ResponseRow]], list[ResponseRow]]] = {
    "second reward": _of_second_reward,
    "rewarded form": _of_form,
    "one form": _of_one_form,
}


def _rewards(row: ResponseRow) -> Mapping[str, Any]:
    rewards = row.get("rewards")
    return rewards if isinstance(rewards, Mapping) else {}


def _rank(value: float, values: Sequence[float]) -> float:
    """Return the fraction of values below a value; equal ones count half."""
    return fmean((other < value) + (other == value) / 2 for other in values)


def _spread(group: Sequence[ResponseRow]) -> float:
    rewards = [number(row.get("reward")) or 0.0 for row in group]
    return max(rewards) - min(rewards)


def _with_different_texts(rows: Iterable[ResponseRow]) -> list[ResponseRow]:
    first: dict[str, ResponseRow] = {}
    for row in rows:
        first.setdefault(text_of(row), row)
    return list(first.values())
