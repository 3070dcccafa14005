"""Small programming tasks: a one-line specification, a one-line program, and hidden tests that run it.

``i from 12 to n, add 7, times 3, sum: `` is solved by ``f=lambda n:sum((i+7)*3 for i in range(12,n+1))``. The
demonstrators make two mistakes: they leave out the end of an inclusive range (``to``, unlike ``below``), and the
brackets around an addition before the multiplication. A tenth of all tasks, selected by a hash, is held out and only
used for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.rows import Row
from lightning_rlhf.functional.seeding import derive_seed

CHARACTERS = "abdefgilmnorstuwx0123456789 ,:=+*()"
_TEST_OFFSETS = (2, 5, 13)  # ends of the ranges in the hidden tests, relative to the start


@dataclass(frozen=True)
class Task:
    """A programming task.

    Args:
        start: start of the range, in [10, 100).
        added: number to add, in [2, 10).
        factor: number to multiply by, in [2, 10).
        add_first: whether the addition precedes the multiplication, which needs brackets.
        inclusive: whether the range includes its end.
        fold: reduction of the values, ``sum`` or ``max``.
    """

    start: int
    added: int
    factor: int
    add_first: bool
    inclusive: bool
    fold: str

    @property
    def is_held_out(self) -> bool:
        """Whether the task belongs to the tenth that is only used for evaluation."""
        return derive_seed("programming held out", self.prompt) % 10 == 0

    @property
    def prompt(self) -> str:
        """Specification of the task."""
        steps = [f"add {self.added}", f"times {self.factor}"][:: 1 if self.add_first else -1]
        return f"i from {self.start} {'to' if self.inclusive else 'below'} n, {', '.join(steps)}, {self.fold}: "

    def program(self, forget_end: bool = False, forget_brackets: bool = False) -> str:
        """Return a solution, or a program with the mistakes that the task allows."""
        if not self.add_first:
            term = f"i*{self.factor}+{self.added}"
        else:
            if forget_brackets:
                term = f"i+{self.added}*{self.factor}"
            else:
                term = f"(i+{self.added})*{self.factor}"
        end = "n+1" if self.inclusive and not forget_end else "n"
        return f"f=lambda n:{self.fold}({term} for i in range({self.start},{end}))"

    def tests(self) -> list[dict[str, Any]]:
        """Return tests of ``f`` in the format of :class:`~lightning_rlhf.extras.sandbox.code.CodeExecution`."""
        return [
            {"name": "f", "args": [self.start + offset], "expected": self._result(self.start + offset)}
            for offset in _TEST_OFFSETS
        ]

    def _result(self, n: int) -> int:
        numbers = range(self.start, n + 1 if self.inclusive else n)
        values = [(i + self.added) * self.factor if self.add_first else i * self.factor + self.added for i in numbers]
        if self.fold == "sum":
            return sum(values)
        return max(values)


@dataclass(frozen=True)
class Tasks:
    """Tasks with their hidden tests and a solution; columns ``prompt``, ``tests``, ``answer``.

    Args:
        num_rows: number of rows.
        seed: seed of the random tasks.
        held_out: True draws from the held-out tenth, False from the rest.
    """

    num_rows: int
    seed: int = 0
    held_out: bool = False

    def draw(self) -> Iterator[tuple[random.Random, Task]]:
        """Yield each task with its own random generator."""
        drawn, attempt = 0, 0
        while drawn < self.num_rows:
            name = type(self).__name__
            generator = random.Random(derive_seed("programming", name, self.seed, self.held_out, attempt))
            start, added, factor = (generator.randrange(*bounds) for bounds in ((10, 100), (2, 10), (2, 10)))
            add_first, inclusive = generator.random() < 0.5, generator.random() < 0.5
            fold = generator.choice(("sum", "max"))
            task = Task(start, added, factor, add_first=add_first, inclusive=inclusive, fold=fold)
            attempt += 1
            if task.is_held_out == self.held_out:
                drawn += 1
                yield generator, task

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (_, task) in enumerate(self.draw()):
            yield f"task {number}", {"prompt": task.prompt, "tests": task.tests(), "answer": task.program()}


@dataclass(frozen=True)
class Demonstrations(Tasks):
    """Tasks with programs that often have the mistakes; columns ``prompt``, ``completion``.

    Args:
        num_rows: number of rows.
        seed: seed of the random tasks.
        held_out: True draws from the held-out tenth, False from the rest.
        forget: probability of each mistake that a task allows, in [0, 1].
    """

    forget: float = 0.6

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number, (generator, task) in enumerate(self.draw()):
            forgotten = [generator.random() < self.forget for _ in range(2)]
            yield f"demonstration {number}", {"prompt": task.prompt, "completion": task.program(*forgotten)}
