"""Rule-based rewards."""

import re
from decimal import Decimal

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.signs import plain_signs

# 1234, 1,234 or 12.5, with a dollar sign and a sign before or after it; the hyphen in 3-5 is not a minus sign.
_NUMBER = re.compile(
    r"(?:(?<![0-9])[-+])?\$?(?:(?<=\$)[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARKED = re.compile(rf"####\s*({_NUMBER.pattern})")


def gsm8k_strict(
    completions: list[str], ground_truth: list[str] | None = None, answer: list[str] | None = None
) -> list[float]:
    """Return 1 if the number after the last ``####`` of the completion is correct, else 0.

    Args:
        completions: responses.
        ground_truth: correct answers: a number, or a text with the result after ``####``.
        answer: correct answers, used if the data has only GSM8K's own column name.

    Raises:
        ValueError: an answer has no such result, because it is other data or another column.
    """
    expected = _expected_numbers(ground_truth, answer)
    return [float(_is_equal(_marked(text), number)) for text, number in zip(completions, expected, strict=True)]


def gsm8k_lenient(
    completions: list[str], ground_truth: list[str] | None = None, answer: list[str] | None = None
) -> list[float]:
    """Return 1 if the last number of the completion is correct, with or without ``####``, else 0.

    Args:
        completions: responses.
        ground_truth: correct answers: a number, or a text with the result after ``####``.
        answer: correct answers, used if the data has only GSM8K's own column name.

    Raises:
        ValueError: an answer has no such result, because it is other data or another column.
    """
    expected = _expected_numbers(ground_truth, answer)
    return [float(_is_equal(_last_number(text), number)) for text, number in zip(completions, expected, strict=True)]


def _expected_numbers(ground_truth: list[str] | None, answer: list[str] | None) -> list[str]:
    answers = answer if ground_truth is None else ground_truth
    if answers is None:
        raise UsageError("GSM8K's rules need the correct answers, in a column 'ground_truth' or 'answer'")
    return [_expected_number(str(text)) for text in answers]


def _expected_number(answer: str) -> str:
    answer = plain_signs(answer)
    whole = _NUMBER.fullmatch(answer.strip())
    number = whole[0] if whole else _marked(answer)
    if number is None:
        raise UsageError(f"the data's answer {answer[-60:]!r} has no '#### <number>', unlike GSM8K's answers")
    return number


def _marked(text: str) -> str | None:
    numbers = _MARKED.findall(plain_signs(text))
    return numbers[-1] if numbers else None


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(plain_signs(text))
    return numbers[-1] if numbers else None


def _is_equal(number: str | None, expected: str) -> bool:
    return number is not None and Decimal(_plain(number)) == Decimal(_plain(expected))


def _plain(number: str) -> str:
    return number.replace("$", "").replace(",", "")


for _rule in (gsm8k_strict, gsm8k_lenient):
    vars(_rule)["per_sample"] = True
