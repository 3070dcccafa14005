"""Reward of a response."""

import re


def right(completions, answer):
    """Return 1 if the last number of a response is the answer, else 0."""
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in completions]
    return [float(integers[-1:] == [wanted]) for integers, wanted in zip(numbers, answer, strict=True)]
