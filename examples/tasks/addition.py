"""Three-digit addition with worked steps: a toy task for all stages of RLHF, in minutes.

``457+368=`` is answered column by column from the right, ``7+8+0=15 5+6+1=12 4+3+1=08:825``. The demonstrators often
forget a carry and compute the rest consistently, so their results are wrong; the preference data prefer the correct
answer. A tenth of all problems, selected by a hash, is held out and only used for evaluation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from lightning_rlhf.data.rows import Row
from lightning_rlhf.functional.seeding import derive_seed

CHARACTERS = "0123456789+=: "
_COLUMNS = 3
_WrongCarry = Callable[[int, int], bool]


def is_held_out(a: int, b: int) -> bool:
    """Return whether a problem belongs to the tenth that is only used for evaluation."""
    return derive_seed("addition held out", a, b) % 10 == 0


def worked_answer(a: int, b: int, wrong_carry: _WrongCarry = lambda column, carry: False) -> str:
    """Return the worked answer to ``a + b``.

    Args:
        a: first number, in [0, 1000).
        b: second number, in [0, 1000).
        wrong_carry: function of a column (0 is the rightmost) and its carry; True writes the carry digit wrongly, and
            all later steps use the digit as written.
    """
    carry, result = 0, ""
    steps = []
    for column in range(_COLUMNS):
        x, y = a // 10**column % 10, b // 10**column % 10
        written = 1 - carry if wrong_carry(column, carry) else carry
        total = x + y + written
        steps.append(f"{x}+{y}+{written}={total:02d}")
        carry, result = total // 10, str(total % 10) + result
    return " ".join(steps) + ":" + ("1" if carry else "") + result


@dataclass(frozen=True)
class Problems:
    """Problems with their correct answers; columns ``prompt``, ``answer``.

    Args:
        num_rows: number of rows.
        seed: seed of the random problems.
        held_out: True draws from the held-out tenth, False from the rest.
    """

    num_rows: int
    seed: int = 0
    held_out: bool = False

    def draw(self) -> Iterator[tuple[random.Random, int, int]]:
        """Yield each problem with its own random generator."""
        drawn, attempt = 0, 0
        while drawn < self.num_rows:
            generator = random.Random(derive_seed("addition", type(self).__name__, self.seed, self.held_out, attempt))
            a, b = generator.randrange(1000), generator.randrange(1000)
            attempt += 1
            if is_held_out(a, b) == self.held_out:
                drawn += 1
                yield generator, a, b

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (_, a, b) in enumerate(self.draw()):
            yield f"problem {number}", {"prompt": f"{a:03d}+{b:03d}=", "answer": worked_answer(a, b)}


@dataclass(frozen=True)
class Demonstrations(Problems):
    """Problems with answers that often forget a carry; columns ``prompt``, ``completion``.

    Args:
        num_rows: number of rows.
        seed: seed of the random problems.
        held_out: True draws from the held-out tenth, False from the rest.
        forget: probability of forgetting a carry of 1, in [0, 1].
    """

    forget: float = 0.6

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (generator, a, b) in enumerate(self.draw()):
            answer = worked_answer(a, b, _forgetting(generator, self.forget))
            yield f"demonstration {number}", {"prompt": f"{a:03d}+{b:03d}=", "completion": answer}


@dataclass(frozen=True)
class Preferences(Problems):
    """Pairs of the correct answer and a near miss; columns ``prompt``, ``chosen``, ``rejected``.

    A near miss forgets carries (3 of 8), forgets exactly one (2 of 8), invents exactly one (2 of 8) or stops short
    (1 of 8).
    """

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
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
class Rankings(Problems):
    """Three to five ranked answers to each problem; columns ``prompt``, ``responses``, ``ranks``.

    The first is correct, and the fewer wrong carries, the better. Equally many are the same rank.
    """

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        faults = [wrong for count in (1, 2, 3) for wrong in itertools.combinations(range(_COLUMNS), count)]
        for number, (generator, a, b) in enumerate(self.draw()):
            chosen = [(), *generator.sample(faults, generator.randint(2, 4))]
            answers = [worked_answer(a, b, _at_all(wrong)) for wrong in chosen]
            ranks = [1 + len(wrong) for wrong in chosen]
            yield f"ranking {number}", {"prompt": f"{a:03d}+{b:03d}=", "responses": answers, "ranks": ranks}


@dataclass(frozen=True)
class Judgements(Problems):
    """One labelled answer to each problem; columns ``prompt``, ``completion``, ``label``.

    Half of the answers are correct, half are near misses as in :class:`Preferences`.
    """

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (generator, a, b) in enumerate(self.draw()):
            is_correct = generator.random() < 0.5
            answer = worked_answer(a, b) if is_correct else _near_miss(generator, a, b)
            yield f"judgement {number}", {"prompt": f"{a:03d}+{b:03d}=", "completion": answer, "label": is_correct}


def exact(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """Return 1 for a finished completion that equals the worked answer, else 0."""
    triples = zip(completions, answer, finished, strict=True)
    return [float(ended and completion == expected) for completion, expected, ended in triples]


def _forgetting(generator: random.Random, probability: float) -> _WrongCarry:
    return lambda column, carry: carry == 1 and generator.random() < probability


def _only_at(wrong_column: int, carry_value: int) -> _WrongCarry:
    return lambda column, carry: column == wrong_column and carry == carry_value


def _at_all(wrong_columns: Collection[int]) -> _WrongCarry:
    return lambda column, carry: column in wrong_columns


def _near_miss(generator: random.Random, a: int, b: int) -> str:
    correct = worked_answer(a, b)
    while True:
        kind = generator.choices(("forget some", "forget one", "invent one", "stop short"), (3, 2, 2, 1))[0]
        column = generator.randrange(1, _COLUMNS)
        if kind == "forget some":
            miss = worked_answer(a, b, _forgetting(generator, 0.7))
        elif kind == "stop short":
            miss = correct[: generator.randint(1, len(correct) - 1)]
        else:
            miss = worked_answer(a, b, _only_at(column, 1 if kind == "forget one" else 0))
        if miss != correct:
            return miss
