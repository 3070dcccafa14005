"""Statistics of scored responses: means with intervals, pass@k, maj@k, lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rlhf.data.image_parts import converted_images
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.extras.commands.response_rows import ALL, ResponseRow, common_columns
from lightning_rlhf.extras.commands.responses_file import ENVIRONMENT_REWARDS
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.functional.samples import (
    draw_sizes,
    majorities,
    mean_difference,
    mean_interval,
    number_or_nan,
    passes,
)
from lightning_rlhf.images import ImageSettings
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import ENVIRONMENT, RewardFunction

Extract = Callable[[list[str]], Sequence[Hashable]]  # returns the answers of the responses to one prompt


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


def score_rows(
    rows: Sequence[ResponseRow], rewards: Sequence[RewardFunction], extract: Extract | None
) -> list[ScoredResponses]:
    """Compute the rewards of every response; functions get None for the columns that a row lacks.

    Args:
        rows: rows with the responses.
        rewards: reward functions.
        extract: function that returns the answers of responses; None extracts no answers.

    Raises:
        RuntimeError: a function failed.
    """
    row_of_response = [row for row in rows for _ in row.responses]
    offered: dict[str, list[Any]] = {
        "prompts": [row.prompt for row in row_of_response],
        "completions": [text for row in rows for text in row.responses],
        "finished": [not cut for row in rows for cut in (row.truncated or [False] * len(row.responses))],
        "messages": [row.messages_with_images for row in row_of_response] if any(row.messages for row in rows) else [],
        **{name: [value for row in rows for value in row.of_conversations[name]] for name in common_columns(rows)},
    }
    if "conversations" in offered:
        offered["conversations"] = [converted_images(each, _read_part) for each in offered["conversations"]]
    columns = sorted({name for row in rows for name in row.columns})
    offered |= {name: [row.columns.get(name) for row in row_of_response] for name in columns}
    if any(row.images for row in rows):
        offered["images"] = [row.images or None for row in row_of_response]
    values = {reward.label: iter(compute_reward(reward, **offered).tolist()) for reward in rewards}
    if ENVIRONMENT_REWARDS in offered:
        numbers = [number_or_nan(value) for value in offered[ENVIRONMENT_REWARDS]]
        values = {ENVIRONMENT: iter(numbers), **values}
    return [
        ScoredResponses(
            source=row.source,
            rewards={name: [next(of_reward) for _ in row.responses] for name, of_reward in values.items()},
            answers=[] if extract is None else extract_answers(extract, row.responses),
            tokens=row.tokens,
            truncated=row.truncated,
            characters=[len(text) for text in row.responses],
        )
        for row in rows
    ]


def _read_part(value: Any) -> dict[str, Any]:
    """Return an image of a conversation, which ``generate`` wrote as a ``data:`` URL, as a part of a message."""
    return {"type": "image", "image": read_image(value, ImageSettings(), None)}


def extract_answers(extract: Extract, responses: list[str]) -> list[Hashable]:
    """Return the answers of the responses to one prompt.

    Raises:
        RunError: the function raised an error, or did not return one hashable answer per response.
    """
    try:
        answers = list(extract(responses))
    except Exception as error:  # any error of a user's function
        raise RunError(f"--answer raised {type(error).__name__}: {error}") from error
    if len(answers) != len(responses):
        raise RunError(f"--answer returned {len(answers)} answers to {len(responses)} responses, expected one for each")
    unhashable = [answer for answer in answers if not isinstance(answer, Hashable)]
    if unhashable:
        raise RunError(f"--answer returned a {type(unhashable[0]).__name__}, expected text or numbers")
    return answers


def statistics_by_source(scored: Sequence[ScoredResponses], correct_at: float) -> dict[str, Any]:
    """Compute the statistics of each source, and the statistics over all sources if there are several."""
    correct_at = torch.tensor(correct_at, dtype=torch.float32).item()  # like rewards, which are float32
    sources = dict.fromkeys(row.source for row in scored)
    result = {name: statistics([row for row in scored if row.source == name], correct_at) for name in sources}
    if len(sources) == 1:
        return result
    return {**result, ALL: statistics(scored, correct_at)}


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
    of_prompts = [passes([value >= correct_at for value in values], sizes) for _, values in applicable]
    if all(len(answers) == len(values) for answers, values in applicable):
        for statistics_of_prompt, (answers, values) in zip(of_prompts, applicable, strict=True):
            statistics_of_prompt |= majorities(answers, values, sizes[1:])
    return result | {name: mean_interval([[values[name]] for values in of_prompts]) for name in of_prompts[0]}


def difference_by_source(before: Sequence[ScoredResponses], after: Sequence[ScoredResponses]) -> dict[str, Any]:
    """Compare the rewards of two lists of responses to the same prompts, and those of each source if there are several.

    Args:
        before: responses to each prompt.
        after: other responses to the same prompts, in the same order.

    Returns:
        ``rewards``, a :func:`difference`, and ``sources``, one for each source.
    """
    sources = dict.fromkeys(row.source for row in before)
    numbers = {name: [i for i, row in enumerate(before) if row.source == name] for name in sources}
    of_sources = {
        name: difference([before[i] for i in rows], [after[i] for i in rows]) for name, rows in numbers.items()
    }
    return {"rewards": difference(before, after), "sources": of_sources if len(sources) > 1 else {}}


def difference(
    before: Sequence[ScoredResponses], after: Sequence[ScoredResponses]
) -> dict[str, dict[str, float | None]]:
    """Compare the rewards of two lists of responses to the same prompts, prompt by prompt.

    Args:
        before: responses to each prompt.
        after: other responses to the same prompts, in the same order.

    Returns:
        For each reward its :func:`~lightning_rlhf.functional.samples.mean_difference`.
    """
    result: dict[str, dict[str, float | None]] = {}
    for name in before[0].rewards.keys() & after[0].rewards.keys():
        means = [
            [[value for value in row.rewards[name] if not math.isnan(value)] for row in rows]
            for rows in (before, after)
        ]
        result[name] = mean_difference(*means)
    return {name: result[name] for name in before[0].rewards if name in result}
