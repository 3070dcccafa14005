"""Addition of long numbers with a calculator: ``[457+368]`` calls it, and its result can be copied.

A small model adds long numbers badly without the tool. Its demonstrations seldom call it, so that training has to
increase the calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_rlhf.data.row import Row
from lightning_rlhf.environments.protocol import ToolError
from lightning_rlhf.functional.seeding import derive_seed

CHARACTERS = "0123456789+=[]Ero: "


def calculate(sum: str) -> str:
    """Add two numbers.

    Args:
        sum: the numbers with a plus sign between them, such as 12+34
    """
    first, plus, second = sum.partition("+")
    if not plus or not first.isdecimal() or not second.isdecimal():
        raise ToolError("")  # without a text, because the tokenizer has no letters
    return str(int(first) + int(second))


@dataclass(frozen=True)
class Problems:
    """Problems with their results; columns ``prompt``, ``answer``.

    Args:
        num_rows: number of rows.
        digits: digits of each number.
        seed: seed of the problems.
    """

    num_rows: int
    digits: int = 9
    seed: int = 0

    def draw(self) -> Iterator[tuple[random.Random, str, str]]:
        """Yield a random generator, problem and result of each row."""
        for number in range(self.num_rows):
            generator = random.Random(derive_seed("calculator", type(self).__name__, self.seed, number))
            a, b = (generator.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2))
            yield generator, f"{a}+{b}", str(a + b)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (_, problem, result) in enumerate(self.draw()):
            yield f"problem {number}", {"prompt": [{"role": "user", "content": f"{problem}="}], "answer": result}


@dataclass(frozen=True)
class Demonstrations(Problems):
    """Solutions, few of which use the calculator; column ``messages``.

    Args:
        num_rows: number of rows.
        digits: digits of each number.
        seed: seed of the problems.
        calls: fraction of the solutions that use the calculator, in [0, 1].
    """

    calls: float = 0.15

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (generator, problem, result) in enumerate(self.draw()):
            messages = [{"role": "user", "content": f"{problem}="}]
            if generator.random() < self.calls:
                messages += [{"role": "assistant", "content": f"[{problem}]"}, {"role": "tool", "content": result}]
            yield f"problem {number}", {"messages": [*messages, {"role": "assistant", "content": result}]}


def right(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """Return 1 for a finished answer that is the result, else 0."""
    return [
        float(ended and text == expected) for text, expected, ended in zip(completions, answer, finished, strict=True)
    ]
