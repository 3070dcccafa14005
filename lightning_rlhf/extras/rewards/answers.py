"""Rewards of the correct answers, to find reward functions that do not recognise them before a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rlhf.data.prompts import PromptDataModule, correct_answer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.types import Completion

_ROWS = 8  # rows whose answers are scored


@dataclass(frozen=True)
class AnswerRewards:
    """Mean rewards that a function returns for the correct answers of the first rows.

    Args:
        example: correct answer of the first row that has one.
        answer: mean reward of the answers themselves as responses; of a list, in the form with the largest reward.
        empty: mean reward of empty responses to the same prompts.
        recognized: whether a row exists whose answer has a larger reward than an empty response.
    """

    example: Any
    answer: float
    empty: float
    recognized: bool

    def warning(self, label: str) -> str:
        """Return a warning if no answer is recognised, and the answers are not texts; else an empty text.

        Args:
            label: name of the reward function.
        """
        if self.recognized or isinstance(self.example, str):
            return ""
        kind = type(self.example).__name__
        return (
            f"reward function {label!r} gives the correct answers of the first rows, written as responses, no larger "
            f"reward than empty responses ({self.empty:g}). ground_truth is a {kind}, such as {self.example!r}, but a "
            f"response is a text: convert one of them before they are compared. Ignore this if a response needs a form "
            f"other than the answer alone"
        )


def rewards_of_answers(rewards: Sequence[RewardFunction], data: PromptDataModule) -> dict[str, AnswerRewards]:
    """Call reward functions with the correct answers of the first training rows as responses.

    Args:
        rewards: reward functions. Those without a parameter for the answer, such as one of the length, and those that
            must not be called before the run (``dry_call: false``) are left out.
        data: data module that was set up.

    Returns:
        The mean rewards by the function's name; empty if the rows have no ``ground_truth``.

    Raises:
        UsageError: a function fails.
    """
    first = data.examples.get("train", ())[:_ROWS]
    rows = [row for row in first if row.columns.get("ground_truth") is not None]
    if not rows:
        return {}
    columns = rows[0].columns
    names = {name for name, value in columns.items() if value is columns["ground_truth"]}  # the data's own name, too
    called = [reward for reward in rewards if reward.supports_dry_run and names & reward.columns]
    if not called:
        return {}
    answers = [row.columns["ground_truth"] for row in rows]
    forms = [_forms(answer) for answer in answers]
    batch = data.collate(rows, list(range(len(rows))), [], 0)
    end = data.tokenizer.eos_token_id
    scores: list[dict[str, torch.Tensor]] = []
    with RewardExecutor(called) as executor:
        for texts in ([""] * len(rows), *zip(*forms, strict=True)):
            ids = [[*data.tokenize(text.encode(errors="replace").decode()), end] for text in texts]
            completions = [Completion(row_ids, [0.0] * len(row_ids), "stop", 0) for row_ids in ids]
            try:
                scores.append(Scorer(batch, executor, data.tokenizer).score(completions).rewards)
            except RuntimeError as error:
                raise UsageError(f"{error}; it was called before the run with correct answers as responses") from error
    results = {}
    for reward in called:
        empty, *others = (score[reward.label].nan_to_num(0.0) for score in scores)
        best = torch.stack(others).amax(0)
        recognized = bool((best > empty).any())
        results[reward.label] = AnswerRewards(answers[0], best.mean().item(), empty.mean().item(), recognized)
    return results


def answer_warnings(rewards: Sequence[RewardFunction], data: PromptDataModule) -> list[str]:
    """Return a warning for each reward function that does not recognise correct answers that are not texts.

    Functions are called only where the first correct answer is not a text. Arguments and errors are those of
    :func:`rewards_of_answers`.
    """
    answers = (row.columns.get("ground_truth") for row in data.examples.get("train", ())[:_ROWS])
    if isinstance(next((answer for answer in answers if answer is not None), ""), str):
        return []
    results = rewards_of_answers(rewards, data)
    return [warning for label, result in results.items() if (warning := result.warning(label))]


def _forms(answer: Any) -> tuple[str, str, str]:
    """Return the texts in which a response may contain an answer."""
    if isinstance(answer, str):
        return (answer,) * 3
    written = json.dumps(answer, ensure_ascii=False, default=str)
    if isinstance(answer, list | tuple):
        parts = [str(part) for part in answer]
        return written, " ".join(parts), ", ".join(parts)
    return written, str(answer), str(answer).lower()


def most_frequent_answer(data: PromptDataModule, part: str) -> tuple[str, float] | None:
    """Return the most frequent correct answer and its fraction of the rows; None if no row has one.

    Args:
        data: prompts with their correct answers.
        part: part of the data, such as ``val``.
    """
    rows = data.examples.get(part, ())
    answers = Counter(answer for answer in (correct_answer(row.columns) for row in rows) if answer is not None)
    if not answers:
        return None
    answer, count = answers.most_common(1)[0]
    return answer, count / len(rows)
