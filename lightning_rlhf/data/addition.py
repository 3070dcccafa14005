"""Three-digit addition with worked steps: a task on which RLHF can be watched from start to end in minutes.

``457+368=`` is answered column by column from the right, ``7+8+0=15 5+6+1=12 4+3+1=08:825``. The demonstrators often
forget a carry and go on consistently, so their results are wrong; people who compare two answers prefer the right one.
A tenth of all problems, chosen by a hash, is held out and only ever used for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_rlhf.data.rows import Row
from lightning_rlhf.seeding import derive_seed

CHARACTERS = "0123456789+=: "
_COLUMNS = 3
_Slip = Callable[[int, int], bool]


def is_held_out(a: int, b: int) -> bool:
    """Whether a problem belongs to the tenth that is only used for evaluation."""
    return derive_seed("addition held out", a, b) % 10 == 0


def worked_answer(a: int, b: int, slip: _Slip = lambda column, carry: False) -> str:
    """The worked answer to ``a + b``.

    Args:
        a: in [0, 1000).
        b: in [0, 1000).
        slip: whether the carry digit of a column (0 is the rightmost) is written wrongly, given the carry; everything
            after it follows from what was written.
    """
    carry, steps, result = 0, [], ""
    for column in range(_COLUMNS):
        x, y = a // 10**column % 10, b // 10**column % 10
        written = 1 - carry if slip(column, carry) else carry
        total = x + y + written
        steps.append(f"{x}+{y}+{written}={total:02d}")
        carry, result = total // 10, str(total % 10) + result
    return " ".join(steps) + ":" + ("1" if carry else "") + result


@dataclass(frozen=True)
class Problems:
    """Problems with their right answers; columns ``prompt``, ``answer``.

    Args:
        num_rows: how many.
        seed: of the draw.
        held_out: from the held-out tenth, or from the rest.
    """

    num_rows: int
    seed: int = 0
    held_out: bool = False

    def draw(self) -> Iterator[tuple[random.Random, int, int]]:
        """Each problem with a generator of its own."""
        kept, attempt = 0, 0
        while kept < self.num_rows:
            generator = random.Random(derive_seed("addition", type(self).__name__, self.seed, self.held_out, attempt))
            a, b = generator.randrange(1000), generator.randrange(1000)
            attempt += 1
            if is_held_out(a, b) == self.held_out:
                kept += 1
                yield generator, a, b

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (_, a, b) in enumerate(self.draw()):
            yield f"problem {number}", {"prompt": f"{a:03d}+{b:03d}=", "answer": worked_answer(a, b)}


@dataclass(frozen=True)
class Demonstrations(Problems):
    """Problems answered by people who often forget a carry; columns ``prompt``, ``completion``.

    Args:
        num_rows: how many.
        seed: of the draw.
        held_out: from the held-out tenth, or from the rest.
        forget: probability with which a needed carry is forgotten, in [0, 1].
    """

    forget: float = 0.6

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (generator, a, b) in enumerate(self.draw()):
            answer = worked_answer(a, b, _forgetting(generator, self.forget))
            yield f"demonstration {number}", {"prompt": f"{a:03d}+{b:03d}=", "completion": answer}


@dataclass(frozen=True)
class Preferences(Problems):
    """The right answer preferred to a near miss; columns ``prompt``, ``chosen``, ``rejected``.

    A near miss forgets carries (3 of 8), forgets exactly one (2 of 8), invents exactly one (2 of 8) or stops short
    (1 of 8).
    """

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (generator, a, b) in enumerate(self.draw()):
            yield (
                f"pair {number}",
                {
                    "prompt": f"{a:03d}+{b:03d}=",
                    "chosen": worked_answer(a, b),
                    "rejected": _near_miss(generator, a, b),
                },
            )


@dataclass(frozen=True)
class Judgements(Problems):
    """One answer to each problem, judged by itself; columns ``prompt``, ``completion``, ``label``.

    Half of them are right, half are near misses as in :class:`Preferences`.
    """

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (generator, a, b) in enumerate(self.draw()):
            right = generator.random() < 0.5
            answer = worked_answer(a, b) if right else _near_miss(generator, a, b)
            yield f"judgement {number}", {"prompt": f"{a:03d}+{b:03d}=", "completion": answer, "label": right}


def exact(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """1 for the right worked answer, character by character and ended, else 0."""
    triples = zip(completions, answer, finished, strict=True)
    return [float(ended and completion == right) for completion, right, ended in triples]


def _forgetting(generator: random.Random, probability: float) -> _Slip:
    return lambda column, carry: carry == 1 and generator.random() < probability


def _only_at(wrong_column: int, wrong_carry: int) -> _Slip:
    return lambda column, carry: column == wrong_column and carry == wrong_carry


def _near_miss(generator: random.Random, a: int, b: int) -> str:
    right = worked_answer(a, b)
    while True:
        kind = generator.choices(("forget some", "forget one", "invent one", "stop short"), (3, 2, 2, 1))[0]
        column = generator.randrange(1, _COLUMNS)
        if kind == "forget some":
            miss = worked_answer(a, b, _forgetting(generator, 0.7))
        elif kind == "stop short":
            miss = right[: generator.randint(1, len(right) - 1)]
        else:
            miss = worked_answer(a, b, _only_at(column, 1 if kind == "forget one" else 0))
        if miss != right:
            return miss
