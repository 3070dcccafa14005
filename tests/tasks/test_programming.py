"""The programming task: solutions pass their hidden tests, trap programs fail all of them, held-out tasks stay held
out."""

import itertools

import pytest

from lightning_rlhf.tasks.programming import CHARACTERS, Demonstrations, Task, Tasks

TASKS = [
    Task(start, 3, 7, add_first, inclusive, fold)
    for start, add_first, inclusive, fold in itertools.product(
        (10, 57, 99), (True, False), (True, False), ("sum", "max")
    )
]


def result(program, n):
    """Run a generated program; the programs compute with numbers only."""
    names = {"sum": sum, "max": max, "range": range, "__builtins__": {}}
    return eval(program.removeprefix("f="), names)(n)


def passed(task, program):
    return [result(program, *test["args"]) == test["expected"] for test in task.tests()]


def test_task_worked_by_hand():
    task = Task(12, 7, 3, add_first=True, inclusive=True, fold="sum")
    assert task.prompt == "i from 12 to n, add 7, times 3, sum: "
    assert task.program() == "f=lambda n:sum((i+7)*3 for i in range(12,n+1))"
    assert task.tests()[0] == {"name": "f", "args": [14], "expected": 57 + 60 + 63}
    other = Task(12, 7, 3, add_first=False, inclusive=False, fold="max")
    assert other.prompt == "i from 12 below n, times 3, add 7, max: "
    assert other.program() == "f=lambda n:max(i*3+7 for i in range(12,n))"
    assert other.tests()[0] == {"name": "f", "args": [14], "expected": 46}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.prompt)
def test_solution_passes_every_test_and_trap_program_passes_none(task):
    assert passed(task, task.program()) == [True] * 3
    if task.inclusive:
        assert passed(task, task.program(forget_end=True)) == [False] * 3
    if task.add_first:
        assert passed(task, task.program(forget_brackets=True)) == [False] * 3
    if not (task.inclusive or task.add_first):
        assert task.program(True, True) == task.program()


def test_one_tenth_is_held_out_and_the_rest_is_trained_on():
    train = {task.prompt for _, task in Tasks(3000).draw()}
    held_out = {task.prompt for _, task in Tasks(1000, held_out=True).draw()}
    assert not train & held_out
    every = [
        Task(s, a, f, True, True, "sum").is_held_out for s in range(10, 100) for a in range(2, 10) for f in range(2, 10)
    ]
    assert 0.085 < sum(every) / len(every) < 0.115


def test_demonstrators_fall_into_traps_at_the_documented_rate():
    tasks = [task for _, task in Demonstrations(3000).draw()]
    output = [row["completion"] for _, row in Demonstrations(3000).rows()]
    for trap, wrong in (("inclusive", "forget_end"), ("add_first", "forget_brackets")):
        having = [(task, text) for task, text in zip(tasks, output, strict=True) if getattr(task, trap)]
        fell = [text in {task.program(**{wrong: True, other: flag}) for flag in (True, False)} for task, text in having
                for other in ({"forget_end", "forget_brackets"} - {wrong})]  # fmt: skip
        assert 0.57 < sum(fell) / len(fell) < 0.63
    right = [text == task.program() for task, text in zip(tasks, output, strict=True)]
    assert 0.45 < sum(right) / len(right) < 0.53  # (1/2 + 1/2 * 0.4)**2 = 0.49


def test_equal_seeds_give_equal_rows_and_other_seeds_other_rows():
    assert list(Tasks(20, seed=3).rows()) == list(Tasks(20, seed=3).rows())
    assert list(Tasks(20, seed=3).rows()) != list(Tasks(20, seed=4).rows())


def test_alphabet_covers_all_written_characters():
    rows = [row for _, row in Tasks(500).rows()] + [row for _, row in Demonstrations(500).rows()]
    written = {letter for row in rows for key in ("prompt", "answer", "completion") for letter in row.get(key, "")}
    assert written == set(CHARACTERS)
