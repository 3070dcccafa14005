"""From judged responses to the figures of a report: means with intervals, pass@k, maj@k, lengths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rlhf.functional.diagnostics import majority_at_k, pass_at_k, wilson_interval

_Z = 1.959964  # of 95 %


@dataclass(frozen=True)
class Judged:
    """One prompt's responses and what was said of them.

    Args:
        source: of the prompt.
        rewards: name to a value for each response, NaN where the reward does not apply.
        answers: that the responses give, None where one gives none; empty if nobody asked.
        tokens: of each response, as far as known.
        truncated: whether the length limit cut each, as far as known.
        characters: of each response.
    """

    source: str
    rewards: dict[str, list[float]]
    answers: Sequence[Hashable] = ()
    tokens: Sequence[int] = ()
    truncated: Sequence[bool] = ()
    characters: Sequence[int] = field(default_factory=list)


def figures(rows: Sequence[Judged], correct_at: float) -> dict[str, Any]:
    """All figures of some prompts.

    Args:
        rows: at least one.
        correct_at: a response with this reward or more is correct.

    Returns:
        Plain values; ``rewards`` has those of each reward.
    """
    found: dict[str, Any] = {"prompts": len(rows), "responses": sum(len(row.characters) for row in rows)}
    told: tuple[tuple[str, list[Any]], ...] = (
        ("response_tokens_mean", [value for row in rows for value in row.tokens]),
        ("response_characters_mean", [value for row in rows for value in row.characters]),
        ("truncated_fraction", [value for row in rows for value in row.truncated]),
    )
    found |= {name: math.fsum(values) / len(values) for name, values in told if values}
    found["rewards"] = {name: _of_reward(rows, name, correct_at) for name in rows[0].rewards}
    return found


def _of_reward(rows: Sequence[Judged], name: str, correct_at: float) -> dict[str, Any]:
    judged = [(row, row.rewards[name]) for row in rows]
    applying = [(row, [value for value in values if not math.isnan(value)]) for row, values in judged]
    applying = [(row, values) for row, values in applying if values]
    counted = sum(len(values) for _, values in applying)
    found: dict[str, Any] = {"not_applicable": sum(len(values) for _, values in judged) - counted}
    if not applying:
        return {**found, "mean": None}
    found |= estimate([values for _, values in applying])
    least = min(len(values) for _, values in applying)
    right = [sum(value >= correct_at for value in values) for _, values in applying]
    sizes = [len(values) for _, values in applying]
    for k in sizes_of_draws(least):
        chances = [pass_at_k(n, c, k) for n, c in zip(sizes, right, strict=True)]
        found[f"pass@{k}"] = estimate([[chance] for chance in chances])
    voting = [(row.answers, values) for (row, values) in applying if len(row.answers) == len(values)]
    if len(voting) == len(applying):
        for k in sizes_of_draws(least)[1:]:
            found[f"maj@{k}"] = estimate([[majority_at_k(answers, values, k)] for answers, values in voting])
    return found


def sizes_of_draws(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n."""
    return sorted({2**power for power in range(n.bit_length())} | {n})


def estimate(samples: Sequence[Sequence[float]]) -> dict[str, float | str | None]:
    """The mean over prompts of the mean over a prompt's samples, with a 95 % interval.

    Prompts are drawn independently, the samples of one prompt are not: more samples of few prompts do not make the
    interval narrower than the prompts' own differences allow. For values in [0, 1] it is Wilson's for as many trials
    as would have the variance that is seen between prompts,

    n = p (1 - p) / (s^2 / m), at least the number m of prompts and at most that of samples,

    with s^2 the mean squared distance of the prompts' means from p; of one 0 or 1 per prompt that is Wilson's interval
    of m trials. For other values it is the normal one, mean -+ 1.96 s / sqrt(m), with s^2 divided by m - 1. See
    "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys", Franco et al. 2019, on
    effective sample sizes, and "Adding Error Bars to Evals", Miller 2024, on prompts as clusters.

    Args:
        samples: of each prompt, at least one.

    Returns:
        ``mean``, ``low``, ``high`` and the ``interval``'s name; the bounds are None where one prompt tells nothing.
    """
    means, prompts = [math.fsum(values) / len(values) for values in samples], len(samples)
    mean = math.fsum(means) / prompts
    squares = math.fsum((value - mean) ** 2 for value in means)
    if all(0 <= value <= 1 for values in samples for value in values):
        spread = squares / prompts**2
        most = sum(len(values) for values in samples)
        trials = min(mean * (1 - mean) / spread, most) if spread > 0 else (most if 0 < mean < 1 else prompts)
        low, high = wilson_interval(mean * max(trials, prompts), max(trials, prompts), _Z)
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    if prompts < 2:
        return {"mean": mean, "low": None, "high": None, "interval": "none"}
    reach = _Z * math.sqrt(squares / (prompts - 1) / prompts)
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "interval": "normal"}
