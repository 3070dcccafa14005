"""Rewards for the content, format and length of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.signs import plain_signs

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Convert to lower case without punctuation, English articles and repeated spaces, as SQuAD compares answers."""
    return " ".join(_ARTICLES.sub(" ", plain_signs(text).lower().translate(_PUNCTUATION)).split())


def tagged(text: str, tag: str) -> str | None:
    """Return the content of the last ``<tag>...</tag>``, or None, in linear time."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    return text[start + len(tag) + 2 : end]


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with nested braces; None if it is missing or not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start, depth = start + len(r"\boxed{"), 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


@dataclass(frozen=True)
class AnswerReward:
    """Compares the answer of each completion with the correct ones.

    Args:
        tag: name of the tag around the answer, as in ``<answer>...</answer>``; the last tag counts, and a completion
            without it gets 0. None uses the whole completion.
        normalize: whether to ignore case, punctuation, articles and repeated spaces, as SQuAD does; False compares
            characters except surrounding spaces.
    """

    tag: str | None = None
    normalize: bool = True

    def score(self, answer: str, correct: str) -> float:
        """Compare an answer with a correct one, both normalised."""
        raise NotImplementedError

    def __call__(self, completions: list[str], ground_truth: list[Any]) -> list[float]:
        """Score each completion with a number in [0, 1], the maximum over its correct answers.

        Args:
            completions: responses.
            ground_truth: correct answer of each, or a list of correct answers, or ``{"target": [...]}``.

        Raises:
            ValueError: a row without a correct answer.
        """
        return [self._best(text, truth) for text, truth in zip(completions, ground_truth, strict=True)]

    def _best(self, text: str, truth: Any) -> float:
        answer = text if self.tag is None else tagged(text, self.tag)
        correct = [self._normalized(text) for text in _correct_answers(truth)]
        if answer is None:
            return 0.0
        return max(self.score(self._normalized(answer), text) for text in correct)

    def _normalized(self, text: str) -> str:
        if self.normalize:
            return normalized(text)
        return text.strip()


class ExactMatch(AnswerReward):
    """Rewards with 1 if the answer equals a correct one, else with 0 ("SQuAD", Rajpurkar et al. 2016, section 6.1).

    It takes the arguments of :class:`AnswerReward`. If you want partial credit, use :class:`TokenF1`.
    """

    per_sample = True

    def score(self, answer: str, correct: str) -> float:
        """Return 1 if equal."""
        return float(answer == correct)


class TokenF1(AnswerReward):
    """Rewards the overlap of words with the correct answer ("SQuAD", Rajpurkar et al. 2016, section 6.1).

    F1 = 2 P R / (P + R) with P = shared words / words of the answer, R = shared words / words of the correct answer. A
    word counts as often as both contain it. Two empty answers score 1, a single empty one 0. It takes the arguments of
    :class:`AnswerReward`.
    """

    per_sample = True

    def score(self, answer: str, correct: str) -> float:
        """Compute F1 of the words."""
        words, expected = answer.split(), correct.split()
        if not words or not expected:
            return float(words == expected)
        return 2 * (Counter(words) & Counter(expected)).total() / (len(words) + len(expected))


@dataclass(frozen=True)
class Format:
    """Rewards with 1 if the whole completion matches a pattern, else with 0.

    Args:
        pattern: regular expression for the completion without surrounding spaces. A dot also matches line breaks.

    Raises:
        ValueError: the pattern is not a valid regular expression.
    """

    per_sample = True
    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise UsageError(f"format pattern {self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completions: list[str]) -> list[float]:
        """Return 1 or 0 for each completion."""
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.fullmatch(text.strip()) is not None) for text in completions]


def think_answer_format(completions: list[str]) -> list[float]:
    """Return 1 if a completion is exactly ``<think>...</think>``, spaces, ``<answer>...</answer>``, else 0.

    The format of "DeepSeek-R1" (2025, table 1). Each tag occurs once.

    Args:
        completions: responses.
    """
    return [float(_thinks_then_answers(text.strip())) for text in completions]


def boxed_format(completions: list[str]) -> list[float]:
    r"""Return 1 if a completion has an answer in ``\boxed{...}``, else 0.

    Args:
        completions: responses.
    """
    return [float(bool((boxed(text) or "").strip())) for text in completions]


@dataclass(frozen=True)
class Length:
    """Rewards with 1 if the length is within a range, decreasing linearly to 0 outside.

    Args:
        least: smallest length with a reward of 1, tokens, at least 0.
        most: largest length with a reward of 1, tokens. May equal ``least``.
        slope: tokens below ``least`` or above ``most`` over which the reward decreases to 0. 0 is a step.

    Raises:
        ValueError: the bounds are invalid.
    """

    per_sample = True
    least: int
    most: int
    slope: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.slope < 0:
            raise UsageError(
                f"length needs 0 <= least <= most and slope >= 0, "
                f"got least={self.least}, most={self.most}, slope={self.slope}"
            )

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        """Compute one number in [0, 1] per completion.

        Args:
            completion_ids: token ids of each response.
        """
        return [self._reward(max(self.least - len(ids), len(ids) - self.most, 0)) for ids in completion_ids]

    def _reward(self, distance: int) -> float:
        if self.slope == 0:
            return float(distance == 0)
        return max(1.0 - distance / self.slope, 0.0)


def _thinks_then_answers(text: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags) or not text.startswith(tags[0]) or not text.endswith(tags[3]):
        return False
    think_end, answer_start = text.find(tags[1]), text.find(tags[2])
    return think_end < answer_start and not text[think_end + len(tags[1]) : answer_start].strip()


def _correct_answers(truth: Any) -> list[str]:
    """Return the correct answers of a row: one, several, or verl's ``{"target": [...]}``."""
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    answers = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not answers or not all(isinstance(answer, str | int | float) for answer in answers):
        raise UsageError(f"ground_truth must be a text, a number or a list of them, got {truth!r}")
    return [str(answer) for answer in answers]
