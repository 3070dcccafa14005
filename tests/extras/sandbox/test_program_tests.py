"""Program tests: no program passes without returning the correct result."""

import json
import math
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox
from lightning_rlhf.extras.sandbox.program_tests import CallTest, TextTest, same_text, same_value
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult
from tests.extras.sandbox.result_forgeries import CALLS, PREAMBLE, TEXTS
from tests.helpers import properties

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
LIMITS = Limits(seconds=4.0)
RIGHT = 2**62 + secrets.randbits(61)  # nineteen digits, unknown in the sandbox
FORGERIES = {name: (CallTest("f", (7,), RIGHT), source) for name, source in CALLS.items()}
FORGERIES |= {name: (TextTest("7\n", f"{RIGHT}\n"), source) for name, source in TEXTS.items()}


@pytest.fixture(scope="module")
def verdicts():
    sandbox = BubblewrapSandbox()

    def judge(forgery):
        test, source = forgery
        return test.run(sandbox, source, LIMITS)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(FORGERIES, pool.map(judge, FORGERIES.values()), strict=True))


def test_forgeries_are_numerous_and_distinct():
    assert len(CALLS) + len(TEXTS) == len(FORGERIES) >= 25


@needs_bwrap
@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_does_not_pass(name, verdicts):
    assert verdicts[name] in ("wrong", "malformed", "error", "timeout", "too much output")


@needs_bwrap
def test_correct_result_passes():
    sandbox = BubblewrapSandbox()
    assert CallTest("f", (7,), RIGHT).run(sandbox, f"def f(x): return {RIGHT} * (x == 7)", LIMITS) == "passed"
    # A program that writes the result like the forgeries, which shows that their format is the right one.
    written = f"{PREAMBLE}os.write(3, json.dumps({{'nonce': nonce(), 'result': {RIGHT}}}).encode()); os._exit(0)"
    assert CallTest("f", (7,), RIGHT).run(sandbox, written, LIMITS) == "passed"
    assert TextTest("7\n", f"{RIGHT}\n").run(sandbox, f"print({RIGHT} * (input() == '7'))", LIMITS) == "passed"


@pytest.mark.quick_cases(8)
@needs_bwrap
@pytest.mark.parametrize(
    ("test", "source", "verdict"),
    [
        (CallTest("f", (2, 3), 5), "def f(a, b):\n    print('a word')\n    return a + b", "passed"),
        (CallTest("f", (2, 3), 5), "class Solution:\n    def f(self, a, b): return a + b", "passed"),
        (CallTest("f", (2,), [1, [2, 3]]), "f = lambda x: (1, (2, 3))", "passed"),
        (CallTest("f", (), {"a": 0.3}), "f = lambda: {'a': 0.1 + 0.2}", "passed"),
        (CallTest("f", ({"k": [None, True, "ä"]},), "ä"), "f = lambda d: d['k'][2]", "passed"),
        (CallTest("f", (), [6], (6,)), "f = lambda: 6", "passed"),
        (CallTest("f", (), [6], (6,)), "f = lambda: [6]", "passed"),
        (CallTest("f", (), [6], (6,)), "f = lambda: [[6]]", "wrong"),
        (CallTest("f", (), 1), "f = lambda: True", "wrong"),
        (CallTest("f", (), 1), "f = lambda: '1'", "wrong"),
        (CallTest("f", (), 1), "f = lambda: {1}", "error"),
        (CallTest("f", (), 1), "f = 1", "error"),
        (CallTest("f", (), 1), "def f(:", "error"),
        (CallTest("f", (), 1), "while True: pass", "timeout"),
        (TextTest("2\n3\n", "5"), "print(int(input()) + int(input()))", "passed"),
        (TextTest("", "1 2\n3\n"), "print('1 2  ')\nprint(3)\nprint()\nexit()", "passed"),
        (TextTest("", "0.333333333"), "print(1 / 3)", "passed"),
        (TextTest("", "1"), "print(1)\nraise SystemExit(1)", "error"),
        (TextTest("", "1"), "print(1, flush=True)\nwhile True: pass", "timeout"),
        (TextTest("", "1"), "print(1)\nprint(' ' * 10**6)", "too much output"),
        (TextTest("", "ü\n"), "print('ü')", "passed"),
        (TextTest("", "1\n"), "if __name__ == '__main__': print(1)", "passed"),
    ],
)
def test_programs_with_known_verdicts(test, source, verdict):
    assert test.run(BubblewrapSandbox(), source, Limits(seconds=1.5)) == verdict


class Recorder:
    """A sandbox that runs nothing and records its input."""

    def __init__(self):
        self.inputs = []

    def check(self):
        return "a recorder"

    def run(self, source, stdin, limits):
        self.inputs.append(source + stdin)
        return ProgramResult("", "", 0)


@pytest.mark.parametrize("test", [CallTest("f", (7,), RIGHT), TextTest("7\n", str(RIGHT))], ids=["call", "text"])
def test_expected_results_never_enter_the_sandbox(test):
    recorder = Recorder()
    assert test.run(recorder, "f = max", LIMITS) in ("malformed", "wrong")  # exit code 0 alone passes no test
    assert str(RIGHT) not in "".join(recorder.inputs)


def test_every_call_has_a_different_nonce():
    recorder = Recorder()
    for _ in range(20):
        CallTest("f", (), 1).run(recorder, "", LIMITS)
    nonces = {json.loads(text[text.rindex('{"nonce"') :])["nonce"] for text in recorder.inputs}
    assert len(nonces) == 20
    assert {len(nonce) for nonce in nonces} == {32}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@properties
@given(JSON)
def test_value_equals_its_json_round_trip(value):
    assert same_value(json.loads(json.dumps(value)), value)


@properties
@given(JSON, JSON)
def test_values_are_equal_only_if_their_json_is(one, other):
    has_floats = any(isinstance(x, float) for x in flat(one) + flat(other))  # these may differ by the tolerance
    if same_value(one, other) and not has_floats:
        assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def flat(value):
    if isinstance(value, dict | list):
        return [x for inner in (value.values() if isinstance(value, dict) else value) for x in flat(inner)]
    return [value]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True), (1.0, 1, True), (1, True, False), (True, 1, False), (0, False, False), (None, 0, False),
        (1.0000005, 1.0, True), (1.00001, 1.0, False), (1e-7, 0.0, True), (math.nan, math.nan, False),
        (math.inf, math.inf, False), (10**4000, 1.0, False), (10**4000, 10**4000, True), ([1], 1, False),
        ([1, 2], (1, 2), True), ([1], [1, 1], False), ({"a": 1}, {"a": 1, "b": 2}, False), ("1", 1, False),
        ({"a": [1.0]}, {"a": [1]}, True), ([], {}, False), (0, -0.0, True), ("a", "a ", False),
    ],
)  # fmt: skip
def test_values_with_known_comparisons(one, other, same):
    assert same_value(one, other) is same


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("5\n", "5", True), ("5 \n\n", "5", True), (" 5  6", "5 6", True), ("5\n\n6", "5\n6", False),
        ("56", "5 6", False), ("5", "5.0", True), ("5.0", "5", False),
        ("0.1000001", "0.1", True), ("0.10001", "0.1", False), ("nan", "1.0", False), ("nan", "nan", True),
        ("inf", "1e400", False), ("1e400", "1e400", True), ("1e-3", "0.001", True), ("a 1.5 b", "a 1.50 b", True),
        ("a 1.5 c", "a 1.50 b", False), ("1\n2", "1 2", False), ("", "", True), ("", "0", False), ("YES", "Yes", False),
        ("1_0.0", "10.0", False), ("5" * 400, "1.5", False),
    ],
)  # fmt: skip
def test_texts_with_known_comparisons(output, expected, same):
    assert same_text(output, expected) is same
