"""Small programming tasks: a specification of a line, a program of a line, hidden tests that only running can pass.

``i from 12 to n, add 7, times 3, sum: `` is solved by ``f=lambda n:sum((i+7)*3 for i in range(12,n+1))``. The
demonstrators fall into two traps, as people do: the end that belongs to the range (``to``, unlike ``below``), and the
brackets around what is added first. A tenth of all tasks, chosen by a hash, is held out and only used for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.rows import Row
from lightning_rlhf.seeding import derive_seed

CHARACTERS = "abdefgilmnorstuwx0123456789 ,:=+*()"
_REACHES = (2, 5, 13)  # how far beyond the start the hidden tests go


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        start: of the range, in [10, 100).
        added: in [2, 10).
        factor: in [2, 10).
        add_first: whether is added before it is multiplied, which takes brackets.
        inclusive: whether the range holds its end.
        fold: ``sum`` or ``max``.
    """

    start: int
    added: int
    factor: int
    add_first: bool
    inclusive: bool
    fold: str

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to the tenth that is only used for evaluation."""
        return derive_seed("programming held out", self.prompt) % 10 == 0

    @property
    def prompt(self) -> str:
        """The specification."""
        steps = [f"add {self.added}", f"times {self.factor}"][:: 1 if self.add_first else -1]
        return f"i from {self.start} {'to' if self.inclusive else 'below'} n, {', '.join(steps)}, {self.fold}: "

    def program(self, forget_end: bool = False, forget_brackets: bool = False) -> str:
        """A solution, or one that fell into a trap where there is one."""
        if not self.add_first:
            term = f"i*{self.factor}+{self.added}"
        else:
            term = f"i+{self.added}*{self.factor}" if forget_brackets else f"(i+{self.added})*{self.factor}"
        end = "n+1" if self.inclusive and not forget_end else "n"
        return f"f=lambda n:{self.fold}({term} for i in range({self.start},{end}))"

    def tests(self) -> list[dict[str, Any]]:
        """What ``f`` must return for a few ends, as :class:`~lightning_rlhf.rewards.code.CodeExecution` takes it."""
        return [
            {"name": "f", "args": [self.start + far], "expected": self._result(self.start + far)} for far in _REACHES
        ]

    def _result(self, n: int) -> int:
        numbers = range(self.start, n + 1 if self.inclusive else n)
        values = [(i + self.added) * self.factor if self.add_first else i * self.factor + self.added for i in numbers]
        return sum(values) if self.fold == "sum" else max(values)


@dataclass(frozen=True)
class Tasks:
    """Tasks with their hidden tests and a solution; columns ``prompt``, ``tests``, ``answer``.

    Args:
        num_rows: how many.
        seed: of the draw.
        held_out: from the held-out tenth, or from the rest.
    """

    num_rows: int
    seed: int = 0
    held_out: bool = False

    def draw(self) -> Iterator[tuple[random.Random, Task]]:
        """Each task with a generator of its own."""
        kept, attempt = 0, 0
        while kept < self.num_rows:
            name = type(self).__name__
            generator = random.Random(derive_seed("programming", name, self.seed, self.held_out, attempt))
            start, added, factor = (generator.randrange(*bounds) for bounds in ((10, 100), (2, 10), (2, 10)))
            add_first, inclusive = generator.random() < 0.5, generator.random() < 0.5
            task = Task(start, added, factor, add_first, inclusive, generator.choice(("sum", "max")))
            attempt += 1
            if task.is_held_out == self.held_out:
                kept += 1
                yield generator, task

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (_, task) in enumerate(self.draw()):
            yield f"task {number}", {"prompt": task.prompt, "tests": task.tests(), "answer": task.program()}


@dataclass(frozen=True)
class Demonstrations(Tasks):
    """Tasks solved by people who often fall into the traps; columns ``prompt``, ``completion``.

    Args:
        num_rows: how many.
        seed: of the draw.
        held_out: from the held-out tenth, or from the rest.
        forget: probability of each trap that a task has, in [0, 1].
    """

    forget: float = 0.6

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows."""
        for number, (generator, task) in enumerate(self.draw()):
            forgotten = [generator.random() < self.forget for _ in range(2)]
            yield f"demonstration {number}", {"prompt": task.prompt, "completion": task.program(*forgotten)}
