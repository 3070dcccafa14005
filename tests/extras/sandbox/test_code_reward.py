"""The code reward: extracting programs, reading tests, scores, caching and sandbox faults."""

import json
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_rlhf.extras.sandbox.code import CodeExecution, extract_program
from lightning_rlhf.extras.sandbox.program_tests import CallTest, TextTest, read_tests
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult, Sandbox, SandboxFault, SandboxUnavailable
from lightning_rlhf.extras.sandbox.remote import RemoteSandbox
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.tasks.programming import Tasks

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/sandbox.md"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
DOUBLE = [{"input": str(i), "output": str(2 * i)} for i in range(4)]
CALLS = [{"name": "double", "args": [i], "expected": 2 * i} for i in range(4)]


class Echo:
    """A sandbox in which every program prints its own source; counts them."""

    def __init__(self, seconds=0.0, fault=False):
        self.runs, self.checks, self.seconds, self.fault, self.lock = [], 0, seconds, fault, threading.Lock()

    def check(self):
        self.checks += 1
        return "an echo"

    def run(self, source, stdin, limits):
        time.sleep(self.seconds)
        with self.lock:
            self.runs.append(source)
        if self.fault:
            raise SandboxFault("no namespaces are left")
        return ProgramResult(source, "", 0)


def text(*expected):
    return [{"input": "", "output": one} for one in expected]


@needs_bwrap
def test_score_is_the_fraction_of_tests_passed():
    right, half = "print(2 * int(input()))", "n = int(input())\nprint(2 * n if n < 2 else 0)"
    reward = CodeExecution()
    assert reward(completions=[right, half, "no program", ""], tests=[DOUBLE] * 4) == [1.0, 0.5, 0.0, 0.0]
    strict = CodeExecution(continuous=False)
    assert strict(completions=[right, half], tests=[DOUBLE] * 2) == [1.0, 0.0]
    calls = ["def double(n): return n + n", "double = lambda n: 2 * n if n != 3 else None"]
    assert reward(completions=calls, ground_truth=[json.dumps(CALLS)] * 2) == [1.0, 0.75]
    mixed = {"tests": [CALLS, None], "ground_truth": [None, json.dumps(CALLS)]}
    assert reward(completions=calls, **mixed) == [1.0, 0.75]


@pytest.mark.slow
@needs_bwrap
def test_rewards_of_correct_and_wrong_programs_of_the_example_data():
    rows = [row for _, row in Tasks(12).rows()]
    reward = RewardFunction(CodeExecution(fenced=False, continuous=False), name="accuracy")
    answers = [row["answer"] for row in rows]
    wrong = [answer.replace("*", "+") for answer in answers]
    for completions, expected in ((answers, 1.0), (wrong, 0.0)):
        rewards = reward.target(completions=completions, tests=[row["tests"] for row in rows])
        assert rewards == [expected] * 12


def test_reward_cannot_be_created_without_a_working_sandbox(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed: install bubblewrap"):
        CodeExecution()


def test_sandbox_is_checked_once_at_construction():
    echo = Echo()
    CodeExecution(sandbox=echo)
    assert echo.checks == 1


def test_sandbox_fault_is_raised_and_not_cached():
    echo = Echo(fault=True)
    reward = CodeExecution(sandbox=echo)
    for completions in (["1"], ["1", "2"]):
        with pytest.raises(SandboxFault, match="no namespaces"):
            reward(completions=completions, tests=[text("1")] * len(completions))
    echo.fault = False
    assert reward(completions=["1"], tests=[text("1")]) == [1.0]  # the fault is not remembered


def test_same_program_for_the_same_tests_runs_once_even_at_the_same_time():
    echo = Echo(seconds=0.05)
    reward = CodeExecution(sandbox=echo)
    assert reward(completions=["1", "2", "1", "1"], tests=[text("1")] * 3 + [text("2")]) == [1.0, 0.0, 1.0, 0.0]
    assert sorted(echo.runs) == ["1", "1", "2"]
    with ThreadPoolExecutor(8) as pool:  # as the executor calls it
        result = list(pool.map(lambda _: reward(completions=["7"], tests=[text("7", "8")]), range(8)))
    assert result == [[0.5]] * 8
    assert echo.runs.count("7") == 2


def test_number_of_cached_scores_is_limited():
    reward = CodeExecution(sandbox=Echo())
    for number in range(1500):
        reward(completions=[str(number)], tests=[text("1")])
    assert len(reward._recent) == 1024


def test_all_or_nothing_stops_at_the_first_failure():
    echo = Echo()
    assert CodeExecution(sandbox=echo, continuous=False)(completions=["1"], tests=[text("2", "1", "1")]) == [0.0]
    assert len(echo.runs) == 1


def test_code_reward_is_scored_during_generation_and_can_be_pickled():
    assert RewardFunction(CodeExecution(sandbox=Echo())).scores_singly
    if shutil.which("bwrap"):
        reward = CodeExecution(continuous=False)
        assert pickle.loads(pickle.dumps(reward)) == reward


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\nprint(1)\n```\nBetter:\n```Python\nprint(2)\nprint(3)\n```", "print(2)\nprint(3)\n"),
        ("```python\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
        ("```text\n1\n```", "```text\n1\n```"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("```python\nx = '''```'''\n```", "x = '''```'''\n"),
        ("", ""),
        ("```python\na\n```python\nb\n```", "a\n```python\nb\n"),
        ("```python\na\n ```\t\nb\n```\nc", "a\n"),
        ("  ``` python extra\na\u2028b\n```", "a\u2028b\n"),
    ],
)
def test_last_python_block_is_extracted(completion, program):
    assert extract_program(completion) == program


def test_extraction_takes_linear_time():
    """A text twenty times longer takes about twenty times as long; with a regular expression four hundred times."""

    def seconds(count):
        began = time.process_time()
        extract_program("```text\n" * count)
        return time.process_time() - began

    short = min(seconds(10_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(3)) < 100 * short


def test_cache_keys_are_small_for_long_tests():
    reward = CodeExecution(sandbox=Echo())
    reward(completions=["1"], tests=[text("1" * 10**6)])
    assert len(pickle.dumps(list(reward._recent))) < 200


TEXT, CALL = [TextTest("2 3", "5")], [CallTest("f", (1, [2]), {"a": 3})]


@pytest.mark.parametrize(
    ("tests_column", "expected"),
    [
        ([{"input": "2 3", "output": "5"}], TEXT),
        ([{"name": "f", "args": [1, [2]], "expected": {"a": 3}}], CALL),
        ({"inputs": ["2 3"], "outputs": ["5"]}, TEXT),
        ({"inputs": ["2 3"], "outputs": ["5"], "fn_name": None}, TEXT),
        ({"inputs": [[1, [2]]], "outputs": [{"a": 3}], "fn_name": "f"}, CALL),
        ({"inputs": ["1\n[2]"], "outputs": ['{"a": 3}'], "fn_name": "f"}, CALL),
        (
            {"inputs": [[1, [2]]], "outputs": [[{"a": 3}]], "fn_name": "f"},
            [CallTest("f", CALL[0].args, [{"a": 3}], ({"a": 3},))],
        ),
        ({"inputs": [["5"]], "outputs": ["5"], "fn_name": "f"}, [CallTest("f", ("5",), "5")]),
        ({"inputs": [["2", "3"]], "outputs": [["5", "6"]]}, [TextTest("2\n3", "5\n6")]),
    ],
)
def test_tests_are_read_in_every_format_and_as_json_text(tests_column, expected):
    assert read_tests(tests_column) == expected
    assert read_tests(json.dumps(tests_column)) == expected


@pytest.mark.parametrize(
    ("tests_column", "message"),
    [
        ("{", "the tests '{' are not JSON"),
        ([], "have an unknown format; expected a list of"),
        (None, "the tests None have an unknown format"),
        (7, "the tests 7 have an unknown format"),
        ([{"input": "1"}], "is neither {input, output} nor {name, args, expected}: {'input': '1'}"),
        ([{"input": 1, "output": 1}], "is neither"),
        (["1"], "is neither"),
        ({"inputs": ["1"], "outputs": []}, "must be lists of the same length"),
        ({"inputs": [], "outputs": []}, "the same length, at least 1"),
        ({"inputs": "12", "outputs": "12"}, "must be lists of the same length"),
        ({"inputs": [1], "outputs": [1]}, "must be strings unless fn_name is set"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "must be a list of arguments, because fn_name is set"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "has a line that is not JSON"),
    ],
)
def test_tests_in_unknown_formats_raise_an_error_that_shows_them(tests_column, message):
    with pytest.raises(ValueError, match=r"tests|input|a test|a call") as raised:
        CodeExecution(sandbox=Echo())(completions=["x"], tests=[tests_column])
    assert message in str(raised.value)


@needs_bwrap
def test_configuration_of_the_page_works():
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    here, there = (yaml.safe_load(block) for block in blocks)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--function", type=Callable[..., Any])
    parser.add_argument("--sandbox", type=Sandbox)
    made = parser.instantiate(parser.parse_object({"function": here["rewards"][0]["function"], **there}))
    assert made.function.limits == Limits()
    assert made.function(completions=["print(1)"], tests=[text("1", "2")]) == [0.5]
    assert made.sandbox == RemoteSandbox("http://sandbox:8080")
    made.sandbox._client.close()


def test_missing_tests_column_raises_an_error():
    with pytest.raises(ValueError, match="needs a column 'tests' or 'ground_truth'"):
        CodeExecution(sandbox=Echo())(completions=["x"])
