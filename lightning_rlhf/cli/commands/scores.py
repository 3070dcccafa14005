"""Statistics of scored responses: means with intervals, pass@k, maj@k, lengths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.functional.diagnostics import majority_at_k, pass_at_k, wilson_interval

_Z = 1.959964  # for 95 %


@dataclass(frozen=True)
class ScoredResponses:
    """Responses to one prompt with their rewards.

    Args:
        source: source of the prompt.
        rewards: values of each reward, one per response, NaN where the reward does not apply.
        answers: answer of each response, None if it has no answer; empty if answers are not extracted.
        tokens: number of tokens of each response; empty if unknown.
        truncated: whether each response reached the length limit; empty if unknown.
        characters: number of characters of each response.
    """

    source: str
    rewards: dict[str, list[float]]
    answers: Sequence[Hashable] = ()
    tokens: Sequence[int] = ()
    truncated: Sequence[bool] = ()
    characters: Sequence[int] = ()


def statistics(rows: Sequence[ScoredResponses], correct_at: float) -> dict[str, Any]:
    """Compute the statistics of some prompts.

    Args:
        rows: one or more prompts.
        correct_at: minimum reward of a correct response.

    Returns:
        Plain values; ``rewards`` contains those of each reward.
    """
    result: dict[str, Any] = {"prompts": len(rows), "responses": sum(len(row.characters) for row in rows)}
    values: dict[str, list[Any]] = {
        "response_tokens_mean": [value for row in rows for value in row.tokens],
        "response_characters_mean": [value for row in rows for value in row.characters],
        "truncated_fraction": [value for row in rows for value in row.truncated],
    }
    result |= {name: math.fsum(known) / len(known) for name, known in values.items() if known}
    result["rewards"] = {name: _reward_statistics(rows, name, correct_at) for name in rows[0].rewards}
    return result


def _reward_statistics(rows: Sequence[ScoredResponses], name: str, correct_at: float) -> dict[str, Any]:
    applicable = []
    not_applicable = 0
    for row in rows:
        values = [value for value in row.rewards[name] if not math.isnan(value)]
        not_applicable += len(row.rewards[name]) - len(values)
        if values:
            applicable.append((row.answers, values))
    if not applicable:
        return {"not_applicable": not_applicable, "mean": None}
    result: dict[str, Any] = {"not_applicable": not_applicable}
    result |= estimate([values for _, values in applicable])
    sizes = draw_sizes(min(len(values) for _, values in applicable))
    for k in sizes:
        correct = [(len(values), sum(value >= correct_at for value in values)) for _, values in applicable]
        result[f"pass@{k}"] = estimate([[pass_at_k(n, c, k)] for n, c in correct])
    if all(len(answers) == len(values) for answers, values in applicable):
        for k in sizes[1:]:
            result[f"maj@{k}"] = estimate([[majority_at_k(answers, values, k)] for answers, values in applicable])
    return result


def draw_sizes(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to n, and n."""
    return sorted({2**power for power in range(n.bit_length())} | {n})


def estimate(samples: Sequence[Sequence[float]]) -> dict[str, float | str | None]:
    """Estimate the mean over prompts of the mean over a prompt's samples, with a 95 % interval.

    Prompts are independent draws, the samples of one prompt are not: more samples of few prompts do not make the
    interval narrower than the variance between prompts allows. For values in [0, 1] the interval is Wilson's, with the
    number of trials that would have the observed variance between prompts,

    n = p (1 - p) / (s^2 / m), at least the number m of prompts and at most that of samples,

    where s^2 is the mean squared distance of the prompts' means from p; for one 0 or 1 per prompt that is Wilson's
    interval of m trials. For other values it is the normal interval, mean -+ 1.96 s / sqrt(m), with s^2 divided by
    m - 1. See "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys", Franco et al.
    2019, on effective sample sizes, and "Adding Error Bars to Evals", Miller 2024, on prompts as clusters.

    Args:
        samples: values of each prompt, at least one.

    Returns:
        ``mean``, ``low``, ``high`` and the name of the ``interval``; ``low`` and ``high`` may be None.
    """
    means = [math.fsum(values) / len(values) for values in samples]
    prompts = len(samples)
    mean = math.fsum(means) / prompts
    squares = math.fsum((value - mean) ** 2 for value in means)
    if all(0 <= value <= 1 for values in samples for value in values):
        variance = squares / prompts**2
        most = sum(len(values) for values in samples)
        trials: float = prompts if mean in (0, 1) else most
        if variance > 0:
            trials = max(prompts, min(mean * (1 - mean) / variance, most))
        low, high = wilson_interval(mean * trials, trials, _Z)
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    if prompts < 2:
        return {"mean": mean, "low": None, "high": None, "interval": "none"}
    reach = _Z * math.sqrt(squares / (prompts - 1) / prompts)
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "interval": "normal"}
