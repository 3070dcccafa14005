"""A reward for programs: the fraction of hidden tests that a program passes in a sandbox."""

from __future__ import annotations

import hashlib
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox
from lightning_rlhf.extras.sandbox.program_tests import ProgramTest, read_tests
from lightning_rlhf.extras.sandbox.protocol import Limits, Sandbox

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")
_THREADS = 16  # the sandbox limits how many programs run at a time
_CACHED_SCORES = 1024


@dataclass(frozen=True)
class CodeExecution:
    """Runs each program against tests as soon as its completion is finished, and rewards the tests that pass.

    Identical programs with the same tests, common in groups of responses, run once. The tests of a program run one
    after another.

    You give the tests in the column ``tests``, or in ``ground_truth`` if your data contain no such column:

    - ``[{"input": "2 3", "output": "5"}]``: the program reads stdin and writes stdout,
    - ``[{"name": "add", "args": [2, 3], "expected": 5}]``: a function of the program is called,
    - ``{"inputs": [...], "outputs": [...], "fn_name": null}``: either kind, in the format of APPS, TACO and
      CodeContests. Results that APPS wraps into a list are correct with and without it.

    Values are compared as JSON: a tuple is a list, True is not 1, NaN equals no value.

    Against forged results, expected ones never enter the sandbox, each test runs in its own process, and a driver
    returns the result of a function as one line of JSON with a random nonce. Any other output on its pipe is a failure.
    So is any exit code but 0, and an exit code of 0 alone is not enough.

    Args:
        sandbox: sandbox that runs the programs. None uses bubblewrap. The constructor tests it and raises an error if
            it does not work.
        limits: resource limits of one test.
        continuous: True returns the fraction of passed tests. False returns 1 if all tests pass, else 0, and stops at
            the first failure.
        fenced: True runs the last fenced block that is marked as Python or names no language, or the whole completion
            if there is no such block. False always runs the whole completion.
    """

    sandbox: Sandbox | None = None
    limits: Limits = field(default_factory=Limits)
    continuous: bool = True
    fenced: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _recent: dict[bytes, Future[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    per_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._sandbox.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sandbox, self.limits, self.continuous, self.fenced)  # without cached values

    def __call__(
        self, completions: list[str], tests: list[Any] | None = None, ground_truth: list[Any] | None = None
    ) -> list[float]:
        """Score each completion with a number in [0, 1].

        Args:
            completions: responses.
            tests: tests of each response.
            ground_truth: tests of each response, used where ``tests`` is missing or None.

        Raises:
            ValueError: neither column has tests, or a row's tests have an unknown format.
            SandboxFault: the sandbox failed, so the programs' results are unknown.
        """
        if tests is None and ground_truth is None:
            raise UsageError(
                "CodeExecution needs a column 'tests' or 'ground_truth': set the data's columns: {tests: <column>}"
            )
        empty = [None] * len(completions)
        rows = [
            (extract_program(text) if self.fenced else text, read_tests(truth if case is None else case))
            for text, case, truth in zip(completions, tests or empty, ground_truth or empty, strict=True)
        ]
        if len(rows) == 1:
            return [self._score(*rows[0])]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda row: self._score(*row), rows))

    def _score(self, program: str, tests: list[ProgramTest]) -> float:
        """Return the score of a program; an identical call returns the cached score or waits for the running one."""
        key = hashlib.sha256(f"{program}\0{tests!r}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            cached = self._recent.get(key)
            score = self._recent[key] = cached or Future()
            if len(self._recent) > _CACHED_SCORES:
                del self._recent[next(iter(self._recent))]
        if cached is None:
            try:
                score.set_result(self._run(program, tests))
            except BaseException as error:
                with self._lock:
                    self._recent.pop(key, None)
                score.set_exception(error)
                raise
        return score.result()

    def _run(self, program: str, tests: list[ProgramTest]) -> float:
        passed = 0
        for test in tests:
            is_passed = test.run(self._sandbox, program, self.limits) == "passed"
            if not (is_passed or self.continuous):
                return 0.0
            passed += is_passed
        return passed / len(tests)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return self.sandbox or BubblewrapSandbox()


def extract_program(completion: str) -> str:
    """Return the last fenced block of Python in a completion, or the whole completion if it has no such block.

    A block ends at a line with only a fence. Lines are read one by one, so the time is linear in the length.
    """
    program = completion
    language = None
    block: list[str] = []
    for line in completion.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if language is None and fence:
            language = fence[1].lower()
            block = []
        elif language is not None and line.strip() == "```":
            if language in ("", "python", "py", "python3"):
                program = "".join(block)
            language = None
        else:
            block.append(line)
    return program
