"""The math reward in worker processes: comparisons, hostile answers, time limits."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest

math_verify = pytest.importorskip("math_verify")

from lightning_rlhf.extras.rewards import math_worker  # noqa: E402
from lightning_rlhf.extras.rewards.math import MathReward, gold_text  # noqa: E402
from lightning_rlhf.rewards.executor import RewardExecutor  # noqa: E402
from lightning_rlhf.rewards.function import RewardFunction  # noqa: E402

GSM8K = Path(os.environ.get("LIGHTNING_RLHF_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"
RIGHT = [
    ("72", "6 times 12 is\n#### 72"),
    ("so 6*12\n#### 72", "72"),
    ("1,234", "#### 1234"),
    ("1234", r"\boxed{1,234}"),
    ("5", "#### $5."),
    ("18", "#### 18 dollars"),
    ("18", "#### 18 (dollars)"),
    ("18", "#### 18 元"),
    ("18", "#### 18. That is all"),
    ("50", "#### 50% of them"),
    ("1/2", "#### 1/2"),
    ("x\n#### 1/2", "#### 1/2"),
    ("x\n#### 3x+1", "#### 1 + 3x"),
    ("18", "Answer: 18"),
    (72, "72"),
    ("-5", "#### -5"),
    (r"\frac{1}{2}", "The answer is 1/2"),
    (r"$\frac{1}{2}$", r"\boxed{0.5}"),
    (r"\boxed{\frac{1}{2}}", r"$\dfrac12$"),
    ("1/2", r"#### \frac{1}{2}"),
    (r"x\n#### $\frac{1}{2}$", "0.5"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("(1,2)", r"\boxed{(1,2)}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    (r"50\%", r"\boxed{50\%}"),
    ("A", r"\boxed{A}"),
    (r"\sqrt{2}", r"first \boxed{3}, no: \boxed{\sqrt 2}"),
    ("5", r"\boxed{x=5}"),
    ("5", "The answer is +5."),
    ("5", "so x = +5"),
    ("8", "3 +5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
]
WRONG = [
    ("72", "#### 71"),
    ("72", ""),
    ("72", "no number at all"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("A", r"\boxed{B}"),
    ("0.333", r"\boxed{1/3}"),
    ("12", r"\boxed{12"),
    ("5", "#### 6, not 5"),
    ("x\n#### 1/2", "#### 1/3"),
    ("x\n#### 3x+1", "#### 3"),
    ("x\n#### 3 x + 1", "#### 3"),
    ("x\n#### (1, 2)", "#### (1, 3)"),
    ("x\n#### 1, 2", "#### 1, 3"),
    ("x\n#### 3 or 4", "#### 3"),
    ("x\n#### $3$ or $4$", "#### 3"),
    ("x\n#### $2$, $3$", "#### 2"),
    ("x\n#### $2$ \\times $10^5$", "#### 2"),
    ("x\n#### 2$\\sqrt{3}$", "#### 2"),
    ("2", "#### 2 pi"),
    ("2", "#### 2 sqrt(3)"),
    ("3", "#### 3 plus 4"),
    ("2", "#### 2 million"),
    ("5", "3 +5"),
    ("5", "5 or 6"),
]
PAYLOAD = "open({marker!r}, 'w').write('x')"


@pytest.fixture(scope="module")
def reward():
    """A reward shared by the tests of this file."""
    reward = MathReward()
    yield reward
    reward.close()


def judged(reward, pairs):
    return reward(completions=[answer for _, answer in pairs], ground_truth=[gold for gold, _ in pairs])


def workers():
    """Return the running processes of all pools."""
    result = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                result.append(child)
    return result


def resident(process):
    """Return the resident memory of a process in bytes, 0 after its end."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def hostile(count, marker):
    """Return distinct answers that try to hang, fill the memory or run code."""
    draw = random.Random(0)
    code = PAYLOAD.format(marker=marker)
    kinds = (
        lambda n: rf"\boxed{{{n}^{{{n}^{{{n}^{{{n}}}}}}}}}",
        lambda n: f"{n}**{n}**{n}**{n}",
        lambda n: rf"\boxed{{{n}^{{10^{{{n}}}}}}}",
        lambda n: rf"\boxed{{({n}0^8)!}}",
        lambda n: rf"${n}0000000!!$",
        lambda n: "{" * (100_000 + n),
        lambda n: r"\boxed{" + "{" * (1000 + n) + "1" + "}" * (1000 + n) + "}",
        lambda n: "(" * (3000 + n) + "1" + ")" * (3000 + n),
        lambda n: r"\boxed{" * (5000 + n),
        lambda n: str(n) * 100_000,
        lambda n: rf"\boxed{{{'9' * (3000 + n)}^{{{'9' * 900}}}}}",
        lambda n: rf"\boxed{{\binom{{{n}0^9}}{{{n}0^8}}}}",
        lambda n: rf"\boxed{{\sum_{{k=1}}^{{{n}0^9}} k^k}}",
        lambda n: rf"\boxed{{\int_0^\infty e^{{x^{{x^{n}}}}} dx}}",
        lambda n: r"\frac{" * (1000 + n),
        lambda n: rf"\boxed{{1e{n}999999999}}",
        lambda n: f"__import__('builtins').{code} #{n}",
        lambda n: rf"\boxed{{__import__('builtins').{code}+{n}}}",
        lambda n: rf"${code}$ = {n}",
        lambda n: f"answer is {n}*(lambda: {code})()",
        lambda n: f"{n}+[c for c in ().__class__.__base__.__subclasses__()][0]({code})",
        lambda n: rf"\boxed{{\text{{eval}}({code})^{n}}}",
        lambda n: "1+" * (5000 + n) + "1",
        lambda n: "\x00" * n + "\ud7ff" * n + r"\boxed{\u{0}}",
    )
    return [kinds[i % len(kinds)](draw.randint(13, 99)) for i in range(count)]


def test_comparisons_with_known_results(reward):
    assert judged(reward, RIGHT) == [1.0] * len(RIGHT)
    assert judged(reward, WRONG) == [0.0] * len(WRONG)


def test_wrong_sets_the_reward_of_wrong_answers():
    reward = MathReward(wrong=-1.0, workers=1)
    assert judged(reward, [("1", "1"), ("1", "2")]) == [1.0, -1.0]
    reward.close()


def test_results_equal_math_verify_s_with_the_correct_answer_first(reward):
    golds = [
        f"${text}$" for text in ("x < 3", "3", r"\frac{3}{4}", r"\{1,2,3\}", "x=2", r"(0,\infty)", r"\pi/4", "2^{10}")
    ]
    pairs = [(gold, answer.replace("$", "")) for gold in golds for answer in golds]
    pairs = [(gold, rf"\boxed{{{answer}}}") for gold, answer in pairs]
    instance = [float(math_verify.verify(math_verify.parse(gold), math_verify.parse(answer))) for gold, answer in pairs]
    assert judged(reward, pairs) == instance
    assert 0 < sum(instance) < len(instance)


def test_asymmetric_pair_shows_the_order(reward):
    """math-verify accepts a plain value for an equation, but not every set for a relation."""
    one, other = "$(1,2)$", r"$\{x : 1 < x < 2\}$"
    forward = math_verify.verify(math_verify.parse(one), math_verify.parse(other))
    backward = math_verify.verify(math_verify.parse(other), math_verify.parse(one))
    assert judged(reward, [(one, other), (other, one)]) == [float(forward), float(backward)]


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K here: set LIGHTNING_RLHF_DATA to the folder that holds gsm8k/")
def test_gsm8k_answers_are_correct_for_their_own_row_only(reward):
    answers = [json.loads(line)["answer"] for line in (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert reward(answers, answers) == [1.0] * len(answers)
    results = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    shifted = [*answers[1:], answers[0]]
    equal = [float(float(one) == float(two)) for one, two in zip(results, [*results[1:], results[0]], strict=True)]
    assert reward(shifted, answers) == equal


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hostile_answers_run_no_code_and_do_not_affect_others(tmp_path):
    """Five of each kind and 12 honest ones on two workers; the test checks counts, not times."""
    marker = tmp_path / "executed"
    answers = hostile(120, str(marker))
    honest = set(range(5, 120, 10))
    texts = [r"\boxed{12}" if i in honest else text for i, text in enumerate(answers)]
    reward = MathReward(timeout_s=0.5, workers=2, memory_mb=512)
    before, result, most = set(workers()), [], 0
    reward(["1"], ["1"])
    thread = threading.Thread(target=lambda: result.extend(reward(texts, ["12"] * len(texts))))
    thread.start()
    while thread.is_alive():
        ours = list(set(workers()) - before)
        assert len(ours) <= 2
        most = max([most, *(resident(child) for child in ours)])
        thread.join(0.1)
    reward.close()
    assert 20 << 20 < most < 512 << 20
    assert not marker.exists()
    assert [i for i, value in enumerate(result) if value == 1.0] == sorted(honest)


def test_beginning_is_truncated_unless_the_answer_is_boxed(reward):
    padding = "and so on " * 1000
    assert judged(reward, [("7", padding + r"\boxed{7}"), ("7", r"\boxed{7}" + padding), ("7", "7 " + padding)]) == [
        1,
        1,
        0,
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("on_timeout", "earned"), [("wrong", 0.0), ("skip", None)])
def test_answer_that_exceeds_the_limit_does_not_affect_others(on_timeout, earned):
    reward = MathReward(timeout_s=0.3, on_timeout=on_timeout, workers=1)
    reward(["1"], ["1"])
    start = time.monotonic()
    assert judged(reward, [("1", r"\boxed{9^{9^{9^{9}}}}"), ("2", "2"), ("3", "4")]) == [earned, 1.0, 0.0]
    assert time.monotonic() - start < 20
    reward.close()


@pytest.mark.slow
def test_worker_that_hangs_is_killed_and_replaced():
    others = set(workers())
    reward = MathReward(timeout_s=1.0, workers=1)
    reward(["1"], ["1"])
    pool = reward._running_pool()
    (before,) = (worker.pid for worker in set(workers()) - others)
    stop = threading.Timer(0.5, os.kill, (before, signal.SIGSTOP))  # neither an interrupt nor a polite request ends it
    stop.start()
    start = time.monotonic()
    assert reward([r"\boxed{9^{9^{9^{9}}}}"], ["1"]) == [0.0]
    assert time.monotonic() - start < 28
    assert reward(["2"], ["2"]) == [1.0]
    assert reward._running_pool() is pool
    assert not psutil.pid_exists(before)
    reward.close()


@pytest.mark.slow
def test_honest_answer_is_compared_after_many_hostile_ones(monkeypatch):
    """Waiting does not count towards the limit, and the fraction given up is logged."""
    monkeypatch.setattr(
        "lightning_rlhf.extras.rewards.math._KILL_S", 30.0
    )  # only processor time counts, on any machine
    slow = r"\boxed{9^{9^{9^{9}}}}"
    texts = [slow] * 8 + ["5"] + [slow] * 3
    for per_sample in (True, False):
        reward = RewardFunction(MathReward(timeout_s=0.1, workers=1), name="math", per_sample=per_sample)
        with RewardExecutor([reward]) as executor:
            columns = {"prompts": [""] * 12, "completions": texts, "ground_truth": ["5"] * 12}
            scores = executor.score(columns)
        reward.close()
        assert scores.rewards["math"].tolist() == [0.0] * 8 + [1.0] + [0.0] * 3
        assert scores.metrics["reward_math/given_up"] == (11.0, 12.0)


def test_worker_has_no_environment_and_writes_no_file(tmp_path):
    script = (
        "import os, resource\n"
        "from lightning_rlhf.extras.rewards import math_worker\n"
        "math_worker.initialize(512)\n"
        "assert not os.environ\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[0] == 512 << 20\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "try:\n    file.write('x'); file.flush()\n"
        "except OSError as error:\n    os._exit(7)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr


def test_interrupted_comparison_leaves_no_timer():
    assert math_worker.is_equal(r"\boxed{1}", r"\boxed{9^{9^{9^{9}}}}", 0.2) is None
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert math_worker.is_equal(r"\boxed{1}", "1", 5.0) is True


def test_invalid_ground_truth_raises_an_error(reward):
    with pytest.raises(ValueError, match="math-verify cannot parse the correct answer"):
        reward(["1"], [r"\boxed{}"])
    for gold in (None, True, ["5"], {"target": "5"}, math.nan, math.inf):
        with pytest.raises(ValueError, match="needs a formula or a finite number as ground_truth, got"):
            reward(["5"], [gold])
    assert gold_text("x\n#### $5") == r"\boxed{5}"


@pytest.mark.slow
def test_processes_that_are_killed_from_outside_are_replaced():
    reward = MathReward()
    try:
        assert reward(["1"], ["1"]) == [1.0]
        for process in multiprocessing.active_children():
            process.kill()
        time.sleep(1)
        assert reward(["1", "2"], ["1", "1"]) == [1.0, 0.0]
    finally:
        reward.close()


def test_completions_and_answers_must_have_equal_length(reward):
    with pytest.raises(ValueError, match="zip"):
        reward(["1"], ["1", "2"])


@pytest.mark.parametrize("option", ["timeout_s", "max_chars", "workers", "memory_mb"])
def test_limits_are_positive(option):
    with pytest.raises(ValueError, match=f"{option} must be positive, got 0"):
        MathReward(**{option: 0})


def test_without_math_verify_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-rlhf\[math\]'"):
        MathReward()


@pytest.mark.slow
def test_comparison_that_was_waiting_when_its_process_was_killed_is_an_error(monkeypatch):
    reward = MathReward(workers=1)
    assert reward.compare([(r"\boxed{1}", r"\boxed{1}")]) == [True]
    manager = reward._pool._pool_manager
    monkeypatch.setattr(manager, "schedule", lambda task: None)  # the call is never sent
    for process in list(manager.worker_manager.workers.values()):
        process.kill()
    with pytest.raises(BrokenProcessPool, match="was killed from outside"):
        reward.compare([(r"\boxed{2}", r"\boxed{2}")])
    monkeypatch.undo()
    assert reward.compare([(r"\boxed{2}", r"\boxed{2}")]) == [True]
    reward.close()
