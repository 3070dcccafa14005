"""Rewards by rule."""

import re

_NUMBER = re.compile(r"-?\$?\d[\d,]*\.?\d*")
_MARKED = re.compile(r"####\s*(-?\$?[\d,]*\.?\d+)")


def gsm8k_strict(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the completion ends its reasoning with ``#### <number>`` and the number is right, else 0.

    Args:
        completions: the responses.
        answer: the data's answers, the result behind ``####``.
    """
    return [float(_same(_marked(text), _marked(right))) for text, right in zip(completions, answer, strict=True)]


def gsm8k_lenient(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the last number of the completion is right, however it is written, else 0.

    Args:
        completions: the responses.
        answer: the data's answers, the result behind ``####``.
    """
    return [float(_same(_last_number(text), _marked(right))) for text, right in zip(completions, answer, strict=True)]


def _marked(text: str) -> str | None:
    found = _MARKED.findall(text)
    return found[-1] if found else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _same(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return False
    return float(_plain(one)) == float(_plain(other))


def _plain(number: str) -> str:
    return number.replace("$", "").replace(",", "").rstrip(".") or "nan"
