"""Rewards by what a text says and how it is laid out."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without punctuation, English articles and repeated spaces: how SQuAD compares answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last ``<tag>...</tag>``; None where there is none. Linear in the text, whatever it holds."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end]


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, inner braces paired; None where there is none or it never closes."""
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
class _Answers:
    """Compares the answer of each completion with the right ones.

    Args:
        tag: the answer stands in the last ``<tag>...</tag>``, and a completion without one earns 0; None takes the
            whole completion.
        normalize: compare as SQuAD does, without case, punctuation, articles and repeated spaces; False compares
            characters, less the spaces around them.
    """

    tag: str | None = None
    normalize: bool = True

    def score(self, given: str, right: str) -> float:
        """Of one answer against one right one, both normalised."""
        raise NotImplementedError

    def __call__(self, completions: list[str], ground_truth: list[Any]) -> list[float]:
        """One number in [0, 1] per completion, the best of its right answers.

        Args:
            completions: the responses.
            ground_truth: a right answer each, or a list of right answers, or ``{"target": [...]}``.

        Raises:
            ValueError: a row without a right answer.
        """
        return [self._best(text, truth) for text, truth in zip(completions, ground_truth, strict=True)]

    def _best(self, text: str, truth: Any) -> float:
        answer = text if self.tag is None else tagged(text, self.tag)
        right = [self._plain(one) for one in _right_answers(truth)]
        return 0.0 if answer is None else max(self.score(self._plain(answer), one) for one in right)

    def _plain(self, text: str) -> str:
        return normalized(text) if self.normalize else text.strip()


class ExactMatch(_Answers):
    """1 where the answer is one of the right ones, else 0 ("SQuAD", Rajpurkar et al. 2016, section 6.1).

    See :class:`TokenF1` for one that gives parts of a point.

    Args:
        tag: the answer stands in the last ``<tag>...</tag>``, and a completion without one earns 0; None takes the
            whole completion.
        normalize: compare as SQuAD does, without case, punctuation, articles and repeated spaces; False compares
            characters, less the spaces around them.
    """

    per_sample = True

    def score(self, given: str, right: str) -> float:
        """1 if equal."""
        return float(given == right)


class TokenF1(_Answers):
    """How many words answer and right answer share ("SQuAD", Rajpurkar et al. 2016, section 6.1).

    F1 = 2 P R / (P + R): P shared words by words given, R shared words by words of the right answer; a word counts as
    often as both have it. Two answers without a word are equal, one without is all wrong.

    Args:
        tag: the answer stands in the last ``<tag>...</tag>``, and a completion without one earns 0; None takes the
            whole completion.
        normalize: compare words without case, punctuation and articles; False compares them as they are.
    """

    per_sample = True

    def score(self, given: str, right: str) -> float:
        """F1 of the words."""
        ours, theirs = given.split(), right.split()
        if not ours or not theirs:
            return float(ours == theirs)
        return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


@dataclass(frozen=True)
class Format:
    """1 where the whole completion has a form, else 0.

    Args:
        pattern: regular expression for the completion less the spaces around it; a dot also matches a line's end.

    Raises:
        ValueError: not a regular expression.
    """

    per_sample = True
    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"format pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completions: list[str]) -> list[float]:
        """1 or 0 per completion."""
        form = re.compile(self.pattern, re.DOTALL)
        return [float(form.fullmatch(text.strip()) is not None) for text in completions]


def think_answer_format(completions: list[str]) -> list[float]:
    """1 where a completion is ``<think>...</think>``, spaces, ``<answer>...</answer>`` and nothing else, else 0.

    The form of "DeepSeek-R1" (2025, table 1). Each tag stands there once.

    Args:
        completions: the responses.
    """
    return [float(_thinks_then_answers(text.strip())) for text in completions]


def boxed_format(completions: list[str]) -> list[float]:
    r"""1 where a completion gives an answer in ``\boxed{...}``, else 0.

    Args:
        completions: the responses.
    """
    return [float(bool((boxed(text) or "").strip())) for text in completions]


@dataclass(frozen=True)
class Length:
    """1 for responses of the wanted length, falling in a straight line to 0 beside it.

    Args:
        least: shortest that earns 1, tokens, at least 0.
        most: longest that earns 1, tokens; the same as ``least`` makes it a target.
        slope: tokens below ``least`` or above ``most`` over which it falls to 0; 0 is a step.

    Raises:
        ValueError: bounds that are no range.
    """

    per_sample = True
    least: int
    most: int
    slope: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.slope < 0:
            raise ValueError(
                f"length needs 0 <= least <= most and slope >= 0, "
                f"got least={self.least}, most={self.most}, slope={self.slope}"
            )

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        """One number in [0, 1] per completion.

        Args:
            completion_ids: the responses' tokens.
        """
        return [self._earned(max(self.least - len(ids), len(ids) - self.most, 0)) for ids in completion_ids]

    def _earned(self, beside: int) -> float:
        return float(beside == 0) if self.slope == 0 else max(1.0 - beside / self.slope, 0.0)


def _thinks_then_answers(text: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags) or not text.startswith(tags[0]) or not text.endswith(tags[3]):
        return False
    thought, between = text.find(tags[1]), text.find(tags[2])
    return thought < between and not text[thought + len(tags[1]) : between].strip()


def _right_answers(truth: Any) -> list[str]:
    """The right answers of a row: one, several, or verl's ``{"target": [...]}``."""
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    found = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not found or not all(isinstance(one, str | int | float) for one in found):
        raise ValueError(f"ground_truth must be a text, a number or a list of them, got {truth!r}")
    return [str(one) for one in found]
