"""Rewards by rule."""

import re
from decimal import Decimal

# 1234 or 1,234, decimals, a dollar sign and a sign before or behind it; the hyphen of 3-5 is no sign.
_NUMBER = re.compile(
    r"(?:(?<![0-9])-)?\$?(?:(?<=\$)-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARKED = re.compile(rf"####\s*({_NUMBER.pattern})")


def gsm8k_strict(
    completions: list[str], ground_truth: list[str] | None = None, answer: list[str] | None = None
) -> list[float]:
    """1 where the number behind the last ``####`` of the completion is right, else 0.

    Args:
        completions: the responses.
        ground_truth: the right answers: a number, or a text with the result behind ``####``.
        answer: the same under GSM8K's own name, for data that have it under no other.

    Raises:
        ValueError: an answer without such a result: the data is another, or the column the wrong one.
    """
    right = _results(ground_truth, answer)
    return [float(_same(_marked(text), result)) for text, result in zip(completions, right, strict=True)]


def gsm8k_lenient(
    completions: list[str], ground_truth: list[str] | None = None, answer: list[str] | None = None
) -> list[float]:
    """1 where the last number of the completion is right, however it is marked, else 0.

    Args:
        completions: the responses.
        ground_truth: the right answers: a number, or a text with the result behind ``####``.
        answer: the same under GSM8K's own name, for data that have it under no other.

    Raises:
        ValueError: an answer without such a result: the data is another, or the column the wrong one.
    """
    right = _results(ground_truth, answer)
    return [float(_same(_last_number(text), result)) for text, result in zip(completions, right, strict=True)]


def _results(ground_truth: list[str] | None, answer: list[str] | None) -> list[str]:
    right = answer if ground_truth is None else ground_truth
    if right is None:
        raise ValueError("GSM8K's rules need the right answers, as a column 'ground_truth' or 'answer'")
    return [_result(one) for one in right]


def _result(answer: str) -> str:
    text = str(answer)
    whole = _NUMBER.fullmatch(text.strip())
    found = whole[0] if whole else _marked(text)
    if found is None:
        raise ValueError(f"the data's answer {text[-60:]!r} has no '#### <number>', as GSM8K's answers have")
    return found


def _marked(text: str) -> str | None:
    found = _MARKED.findall(text)
    return found[-1] if found else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _same(one: str | None, other: str) -> bool:
    return one is not None and Decimal(_plain(one)) == Decimal(_plain(other))


def _plain(number: str) -> str:
    return number.replace("$", "").replace(",", "")


for _rule in (gsm8k_strict, gsm8k_lenient):
    vars(_rule)["per_sample"] = True
