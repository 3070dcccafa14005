"""A reward for programs: the share of hidden tests that a program passes in a sandbox."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from lightning_rlhf.rewards.sandbox import Limits, Sandbox
from lightning_rlhf.rewards.sandbox_bubblewrap import BubblewrapSandbox
from lightning_rlhf.rewards.sandbox_verdict import CallTest, Test, TextTest

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")
_THREADS = 16  # the sandbox says how many programs run at a time
_RECENT = 1024  # scores that are remembered
_FORMS = (
    "a list of {input, output} or of {args, expected} with {name}, or {inputs, outputs} with fn_name where functions "
    "are called; all of it as JSON text or as it is"
)


@dataclass(frozen=True)
class CodeExecution:
    """A reward function that runs programs against tests, each as soon as it is there.

    The same program for the same tests, as groups of responses often have it, is run once.

    Tests are taken from the column ``tests``, and from ``ground_truth`` where the data has no such column:

    - ``[{"input": "2 3", "output": "5"}]``: the program reads and prints,
    - ``[{"name": "add", "args": [2, 3], "expected": 5}]``: a function of it is called,
    - ``{"inputs": [...], "outputs": [...], "fn_name": null}``: either, as in APPS, TACO and CodeContests.

    Args:
        sandbox: where programs run; None takes bubblewrap. It is tried at once: without one that works there is no
            reward.
        limits: of one test.
        continuous: True gives the share of tests passed; False 1 where all are passed, else 0, and stops at the first
            that is not.
        fenced: take the last block fenced with three backquotes (and ``python``, ``py`` or nothing) where there is one,
            else the whole completion; False always takes the whole.
    """

    sandbox: Sandbox | None = None
    limits: Limits = field(default_factory=Limits)
    continuous: bool = True
    fenced: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _recent: dict[bytes, Future[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    per_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._place.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sandbox, self.limits, self.continuous, self.fenced)  # what is cached stays here

    def __call__(
        self, completions: list[str], tests: list[Any] | None = None, ground_truth: list[Any] | None = None
    ) -> list[float]:
        """One number in [0, 1] per completion.

        Args:
            completions: the responses.
            tests: of each response.
            ground_truth: used where there is no column ``tests``, or nothing in it.

        Raises:
            ValueError: no column holds tests, or a row's are not in a form that is known.
            SandboxFault: the sandbox failed; nothing is known about the programs.
        """
        if tests is None and ground_truth is None:
            raise ValueError("CodeExecution needs a column 'tests' or 'ground_truth': name it under the data's columns")
        nothing = [None] * len(completions)
        rows = [
            (program_of(text) if self.fenced else text, read_tests(truth if own is None else own))
            for text, own, truth in zip(completions, tests or nothing, ground_truth or nothing, strict=True)
        ]
        if len(rows) == 1:
            return [self._score(*rows[0])]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda row: self._score(*row), rows))

    def _score(self, program: str, tests: list[Test]) -> float:
        """The score, or that of the same program and tests a moment ago, or of a thread that is at it now."""
        key = hashlib.sha256(f"{program}\0{tests!r}".encode("utf-8", "surrogatepass")).digest()  # tests may be long
        with self._lock:
            known = self._recent.get(key)
            score = self._recent[key] = known or Future()
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        if known is None:
            try:
                score.set_result(self._run(program, tests))
            except BaseException as fault:
                with self._lock:
                    self._recent.pop(key, None)
                score.set_exception(fault)
                raise
        return score.result()

    def _run(self, program: str, tests: list[Test]) -> float:
        passed = 0
        for test in tests:
            right = test.judge(self._place, program, self.limits) == "passed"
            if not (right or self.continuous):
                return 0.0
            passed += right
        return passed / len(tests)

    @cached_property
    def _place(self) -> Sandbox:
        return self.sandbox or BubblewrapSandbox()


def program_of(completion: str) -> str:
    """The last fenced block of Python in a completion, or the whole of it where there is none.

    A block ends at a line with a fence and nothing else; read line by line, so in linear time whatever a policy writes.
    """
    program, language, begun = completion, None, list[str]()
    for line in completion.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if language is None and fence:
            language, begun = fence[1].lower(), []
        elif language is not None and line.strip() == "```":
            if language in ("", "python", "py", "python3"):
                program = "".join(begun)
            language = None
        else:
            begun.append(line)
    return program


def read_tests(given: Any) -> list[Test]:
    """The tests of a row, in one of the three forms of :class:`CodeExecution`.

    Raises:
        ValueError: another form, or none at all.
    """
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError as error:
            raise ValueError(f"the tests {_short(given)} are no JSON ({error}); expected {_FORMS}") from None
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        return _paired(value, given)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"the tests {_short(given)} are not in a form that is known; expected {_FORMS}")
    return [_one(test, given) for test in value]


def _one(test: Any, given: Any) -> Test:
    if isinstance(test, Mapping):
        if isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
            return TextTest(test["input"], test["output"])
        if isinstance(test.get("name"), str) and isinstance(test.get("args"), Sequence) and "expected" in test:
            return CallTest(test["name"], tuple(test["args"]), test["expected"])
    raise ValueError(
        f"a test of {_short(given)} is neither {{input, output}} nor {{name, args, expected}}: {_short(test)}"
    )


def _paired(value: Mapping[str, Any], given: Any) -> list[Test]:
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    lists = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
    if not lists or not inputs or len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs of {_short(given)} must be lists of one length, of at least one test")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        return [_call(name, one, other, given) for one, other in pairs]
    texts = [tuple(map(_lines, pair)) for pair in pairs]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise ValueError(f"inputs and outputs of {_short(given)} must be texts, because there is no fn_name")
    return [TextTest(one, other) for one, other in texts]


def _lines(value: Any) -> Any:
    """A text as it is, or the one that a list of lines makes."""
    is_lines = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if is_lines else value


def _call(name: str, arguments: Any, result: Any, given: Any) -> CallTest:
    """A call in one of two forms: texts with an argument in JSON on each line, and the result; or a list and a value.

    APPS puts some results into a list of their own and others not, so both will do.
    """
    if isinstance(arguments, str):
        try:
            wanted = json.loads(result) if isinstance(result, str) else result
            return CallTest(name, tuple(json.loads(line) for line in arguments.splitlines()), wanted)
        except ValueError as error:
            raise ValueError(f"a call of {_short(given)} has a line that is no JSON: {error}") from None
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"an input of {_short(given)} must be a list of arguments, because there is a fn_name")
    inner = tuple(result) if isinstance(result, list | tuple) and len(result) == 1 else ()
    return CallTest(name, tuple(arguments), result, inner)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
