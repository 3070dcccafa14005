"""Whether a program does what a test wants: decided here, by comparing what it said, never by the program itself.

What is expected never enters the sandbox, and each test has a process of its own, so there is nothing in there that a
program could steal, patch or overwrite to be called right. It can only say the right thing.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from lightning_rlhf.rewards.sandbox import Limits, Sandbox

Verdict = Literal["passed", "wrong", "malformed", "error", "timeout", "too much output"]

_CLOSE = 1e-6  # relative or absolute, as programming contests have it
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
# Runs in the sandbox. What the program prints goes to stderr; the answer goes to what stdout was.
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
    """A program that reads and prints.

    Args:
        stdin: what it reads.
        expected: what it must print, line by line and word by word. Where a word is a number with a decimal point, one
            within 1e-6 will do.
    """

    stdin: str
    expected: str

    def judge(self, sandbox: Sandbox, source: str, limits: Limits) -> Verdict:
        """Run the program and compare."""
        found = sandbox.run(source, self.stdin, limits)
        if found.timed_out or found.truncated or found.exit_code != 0:
            return "timeout" if found.timed_out else "too much output" if found.truncated else "error"
        return "passed" if same_text(found.stdout, self.expected) else "wrong"


@dataclass(frozen=True)
class CallTest:
    """A function that is called with arguments that JSON can hold.

    Args:
        name: of the function, or of a method of a class ``Solution`` in the program.
        args: given by position.
        expected: what it must return, compared as JSON: a tuple is a list, True is not 1.
        also: what will do as well.
    """

    name: str
    args: tuple[Any, ...]
    expected: Any
    also: tuple[Any, ...] = ()

    def judge(self, sandbox: Sandbox, source: str, limits: Limits) -> Verdict:
        """Have the function called and compare."""
        nonce = secrets.token_hex(16)
        task = {"nonce": nonce, "source": source, "name": self.name, "args": self.args}
        found = sandbox.run(_CALLER, json.dumps(task), limits)
        if found.timed_out or found.truncated or found.exit_code != 0:
            return "timeout" if found.timed_out else "too much output" if found.truncated else "error"
        answer = _answer(found.stdout, nonce)
        if answer is None:
            return "malformed"
        right = any(same_value(answer["result"], one) for one in (self.expected, *self.also))
        return "passed" if right else "wrong"


Test = TextTest | CallTest


def same_text(said: str, expected: str) -> bool:
    """Whether a text has the expected words in the expected lines, but for the last digits of decimal numbers."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (said, expected))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    return all(all(map(_same_word, *lines)) for lines in zip(ours, theirs, strict=True))


def _same_word(one: str, expected: str) -> bool:
    if one == expected:
        return True
    # Only what is written as a decimal number by the test may differ: 1e400 and nan are close to nothing.
    both = _DECIMAL.fullmatch(expected) and re.fullmatch(r"[+-]?\d+|" + _DECIMAL.pattern, one)
    return bool(both) and _close(float(one), float(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Whether two values that JSON can hold are the same; numbers with a decimal point within 1e-6."""
    if isinstance(expected, list | tuple):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (_close(value, expected) if isinstance(expected, float) else value == expected)
    return type(value) is type(expected) and bool(value == expected)


def _close(one: float, other: float) -> bool:
    # An integer of a thousand digits is no float, and asking isclose would be an error.
    return abs(one) <= sys.float_info.max and math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _answer(stdout: str, nonce: str) -> dict[str, Any] | None:
    """The one line of a well-formed answer; None for anything else."""
    try:
        answer = json.loads(stdout, parse_constant=_no_number)
    except (ValueError, RecursionError):  # no JSON, two documents, ten thousand digits, a million brackets
        return None
    well_formed = isinstance(answer, dict) and answer.keys() == {"nonce", "result"} and answer["nonce"] == nonce
    return answer if well_formed else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
