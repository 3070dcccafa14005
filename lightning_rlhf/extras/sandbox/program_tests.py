"""Tests of programs: reading them from data, running them in a sandbox, and comparing the results.

Expected results never enter the sandbox, and each test runs in its own process, so a program can neither read them nor
influence the comparison. It can pass a test only by returning the correct result.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult, Sandbox

Verdict = Literal["passed", "wrong", "malformed", "error", "timeout", "too much output"]

_TOLERANCE = 1e-6  # relative or absolute, as in programming contests
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_FORMATS = (
    "a list of {input, output} or of {args, expected} with {name}, or {inputs, outputs} with fn_name to call a "
    "function; as JSON text or as objects"
)
# Runs in the sandbox. The program's own output goes to stderr; only the answer goes to the original stdout.
_CALLER = """
import json, os, sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

task = json.loads(sys.stdin.read())
answer = os.dup(1)
os.dup2(2, 1)
with open("candidate.py", "w", encoding="utf-8") as file:
    file.write(task["source"])
module = sys.modules["candidate"] = ModuleType("candidate")
SourceFileLoader("candidate", os.path.abspath("candidate.py")).exec_module(module)
names = vars(module)
function = names[task["name"]] if task["name"] in names else getattr(names["Solution"](), task["name"])
result = function(*task["args"])
os.write(answer, json.dumps({"nonce": task["nonce"], "result": result}).encode() + b"\\n")
"""


@dataclass(frozen=True)
class TextTest:
    """A test of a program that reads stdin and writes stdout.

    Args:
        stdin: the program's input.
        expected: the expected output, compared by lines and words. A word that is a decimal number may differ by 1e-6.
    """

    stdin: str
    expected: str

    def run(self, sandbox: Sandbox, source: str, limits: Limits) -> Verdict:
        """Run the program and compare its output."""
        result = sandbox.run(source, self.stdin, limits)
        if failure := _failure(result):
            return failure
        if same_text(result.stdout, self.expected):
            return "passed"
        return "wrong"


@dataclass(frozen=True)
class CallTest:
    """A test that calls a function of a program.

    Args:
        name: name of the function, or of a method of the program's class ``Solution``.
        args: positional arguments, of types that JSON can represent.
        expected: expected return value, compared as JSON: a tuple is a list, True is not 1.
        also: other return values that are correct.
    """

    name: str
    args: tuple[Any, ...]
    expected: Any
    also: tuple[Any, ...] = ()

    def run(self, sandbox: Sandbox, source: str, limits: Limits) -> Verdict:
        """Call the function and compare its return value."""
        nonce = secrets.token_hex(16)
        task = {"nonce": nonce, "source": source, "name": self.name, "args": self.args}
        result = sandbox.run(_CALLER, json.dumps(task), limits)
        if failure := _failure(result):
            return failure
        answer = _parse_answer(result.stdout, nonce)
        if answer is None:
            return "malformed"
        correct = any(same_value(answer["result"], expected) for expected in (self.expected, *self.also))
        if correct:
            return "passed"
        return "wrong"


ProgramTest = TextTest | CallTest


def _failure(result: ProgramResult) -> Verdict | None:
    if result.timed_out:
        return "timeout"
    if result.truncated:
        return "too much output"
    if result.exit_code != 0:
        return "error"
    return None


# -- comparing -----------------------------------------------------------------------------------------------


def same_text(text: str, expected: str) -> bool:
    """Return whether two texts have the same words in each line, except for the last digits of decimal numbers."""
    lines = [line.split() for line in text.rstrip().splitlines()]
    expected_lines = [line.split() for line in expected.rstrip().splitlines()]
    if list(map(len, lines)) != list(map(len, expected_lines)):
        return False
    return all(all(map(_same_word, *words)) for words in zip(lines, expected_lines, strict=True))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    # Only words that are decimal numbers in the test may differ; 1e400 and nan are never close.
    both = _DECIMAL.fullmatch(expected) and re.fullmatch(r"[+-]?\d+|" + _DECIMAL.pattern, word)
    return bool(both) and _is_close(float(word), float(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; floating-point numbers may differ by 1e-6."""
    if isinstance(expected, list | tuple):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (_is_close(value, expected) if isinstance(expected, float) else value == expected)
    return type(value) is type(expected) and bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    # math.isclose raises an error for integers beyond the range of floats.
    in_range = abs(value) <= sys.float_info.max
    return in_range and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _parse_answer(stdout: str, nonce: str) -> dict[str, Any] | None:
    """Parse the single JSON line of an answer; return None for any other output."""
    try:
        answer = json.loads(stdout, parse_constant=_reject_constant)
    except (ValueError, RecursionError):  # not JSON, several documents, too many digits or brackets
        return None
    well_formed = isinstance(answer, dict) and answer.keys() == {"nonce", "result"} and answer["nonce"] == nonce
    if well_formed:
        return answer
    return None


def _reject_constant(name: str) -> NoReturn:
    raise UsageError(f"{name} is not valid JSON")


# -- reading tests from data ---------------------------------------------------------------------------------


def read_tests(column: Any) -> list[ProgramTest]:
    """Read the tests of a row, in a format of :class:`~lightning_rlhf.extras.sandbox.code.CodeExecution`.

    Raises:
        ValueError: another format, or an empty list.
    """
    value = column
    if isinstance(column, str):
        try:
            value = json.loads(column)
        except ValueError as error:
            raise UsageError(f"the tests {_short(column)} are not JSON ({error}); expected {_FORMATS}") from None
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        return _read_paired(value, column)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UsageError(f"the tests {_short(column)} have an unknown format; expected {_FORMATS}")
    return [_read_one(test, column) for test in value]


def _read_one(test: Any, column: Any) -> ProgramTest:
    if isinstance(test, Mapping):
        if isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
            return TextTest(test["input"], test["output"])
        if isinstance(test.get("name"), str) and isinstance(test.get("args"), Sequence) and "expected" in test:
            return CallTest(test["name"], tuple(test["args"]), test["expected"])
    raise UsageError(
        f"a test of {_short(column)} is neither {{input, output}} nor {{name, args, expected}}: {_short(test)}"
    )


def _read_paired(value: Mapping[str, Any], column: Any) -> list[ProgramTest]:
    inputs, outputs = value["inputs"], value["outputs"]
    lists = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
    if not lists or not inputs or len(inputs) != len(outputs):
        raise UsageError(f"inputs and outputs of {_short(column)} must be lists of the same length, at least 1")
    pairs = list(zip(inputs, outputs, strict=True))
    if name := value.get("fn_name"):
        return [_read_call(name, arguments, result, column) for arguments, result in pairs]
    texts = [(_join_lines(stdin), _join_lines(stdout)) for stdin, stdout in pairs]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise UsageError(f"inputs and outputs of {_short(column)} must be strings unless fn_name is set")
    return [TextTest(stdin, stdout) for stdin, stdout in texts]


def _join_lines(value: Any) -> Any:
    """Join a list of lines; return other values unchanged."""
    is_lines = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
    if is_lines:
        return "\n".join(value)
    return value


def _read_call(name: str, arguments: Any, result: Any, column: Any) -> CallTest:
    """Read a call whose arguments are a text with one JSON value per line, or a list.

    APPS wraps only some results in a list, so a result is correct with and without it.
    """
    if isinstance(arguments, str):
        try:
            expected = json.loads(result) if isinstance(result, str) else result
            return CallTest(name, tuple(json.loads(line) for line in arguments.splitlines()), expected)
        except ValueError as error:
            raise UsageError(f"a call of {_short(column)} has a line that is not JSON: {error}") from None
    if not isinstance(arguments, list | tuple):
        raise UsageError(f"an input of {_short(column)} must be a list of arguments, because fn_name is set")
    unwrapped = ()
    if isinstance(result, list | tuple) and len(result) == 1:
        unwrapped = tuple(result)
    return CallTest(name, tuple(arguments), result, unwrapped)


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= 80:
        return text
    return text[:77] + "..."
