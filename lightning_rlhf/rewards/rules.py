"""Rewards by rule."""

import re

# 1234 or 1,234, decimals, a dollar sign and a sign before or behind it; the hyphen of 3-5 is no sign.
_NUMBER = re.compile(
    r"(?:(?<![0-9])-)?\$?(?:(?<=\$)-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARKED = re.compile(rf"####\s*({_NUMBER.pattern})")


def gsm8k_strict(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the number behind the last ``####`` of the completion is right, else 0.

    Args:
        completions: the responses.
        answer: the data's answers, the result behind ``####``.

    Raises:
        ValueError: an answer without such a result: the data is another, or the column the wrong one.
    """
    return [float(_same(_marked(text), _result(right))) for text, right in zip(completions, answer, strict=True)]


def gsm8k_lenient(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the last number of the completion is right, however it is marked, else 0.

    Args:
        completions: the responses.
        answer: the data's answers, the result behind ``####``.

    Raises:
        ValueError: an answer without such a result: the data is another, or the column the wrong one.
    """
    return [float(_same(_last_number(text), _result(right))) for text, right in zip(completions, answer, strict=True)]


def _result(answer: str) -> str:
    found = _marked(answer)
    if found is None:
        raise ValueError(f"the data's answer {answer[-60:]!r} has no '#### <number>', as GSM8K's answers have")
    return found


def _marked(text: str) -> str | None:
    found = _MARKED.findall(text)
    return found[-1] if found else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _same(one: str | None, other: str) -> bool:
    return one is not None and float(_plain(one)) == float(_plain(other))


def _plain(number: str) -> str:
    return number.replace("$", "").replace(",", "")
