"""Statistics of scored responses: means with intervals, pass@k, maj@k, lengths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.functional.diagnostics import majority_at_k, mean_interval, pass_at_k


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
    result |= mean_interval([values for _, values in applicable])
    sizes = draw_sizes(min(len(values) for _, values in applicable))
    for k in sizes:
        correct = [(len(values), sum(value >= correct_at for value in values)) for _, values in applicable]
        result[f"pass@{k}"] = mean_interval([[pass_at_k(n, c, k)] for n, c in correct])
    if all(len(answers) == len(values) for answers, values in applicable):
        for k in sizes[1:]:
            result[f"maj@{k}"] = mean_interval([[majority_at_k(answers, values, k)] for answers, values in applicable])
    return result


def draw_sizes(n: int) -> list[int]:
    """Return 1, 2, 4, ... up to n, and n."""
    return sorted({2**power for power in range(n.bit_length())} | {n})
