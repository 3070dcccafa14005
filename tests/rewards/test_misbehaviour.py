"""Misbehaving reward functions: failures are counted or raised, end in time, and affect nothing else."""

import contextlib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from pebble.pool.process import PoolManager

from lightning_rlhf.calls import guard
from lightning_rlhf.calls.guard import SCAN_SECONDS
from lightning_rlhf.extras.rewards.sources import BySource
from lightning_rlhf.rewards.executor import RewardExecutor, compute_reward
from lightning_rlhf.rewards.function import RewardFunction
from tests.rewards.daemons import start_daemon

FILE = Path(__file__).with_name("misbehaving.py")
DAEMONS = Path(__file__).with_name("daemons.py")
LIMIT = 2.0
HANGS = {
    "sleeps", "spins", "ignores_the_end", "deadlocks", "waits_for_a_thread_that_never_ends", "backtracks",
    "computes_for_ever_without_python", "swallows_every_error", "reads_from_an_idle_pipe",
    "starts_a_process_and_waits",
}  # fmt: skip
FAULTS = {
    "raises": "raised KeyError: 'level'",
    "raises_what_cannot_be_sent": "raised Unsendable: 1",
    "raises_base_exception": "raised BaseException: base",
    "interrupts": "raised KeyboardInterrupt: ",
    "exits": "raised SystemExit: 3",
    "exits_with_nothing": "raised SystemExit: ",
    "ends_its_process": "ended its worker process (exit code 0)",
    "ends_its_process_with_seven": "ended its worker process (exit code 7)",
    "kills_its_process": "ended its worker process (killed by signal 9 (SIGKILL), often because memory ran out)",
    "terminates_its_process": "ended its worker process (killed by signal 15 (SIGTERM))",
    "aborts": "ended its worker process (killed by signal 6 (SIGABRT))",
    "reads_from_nowhere": "ended its worker process (killed by signal 11 (SIGSEGV))",
    "recurses": "raised RecursionError: maximum recursion depth exceeded",
    "returns_text": "returned '1.0' for completion 1, expected a finite number, or None where it does not apply",
    "returns_nan": "returned nan for completion 1",
    "returns_infinity": "returned inf for completion 1",
    "returns_what_float32_has_not": "returned 1e+39 for completion 1",
    "returns_a_number_beyond_all_floats": "returned 1000000000",
    "returns_a_dictionary_without_score": "returned {'reward': 1.0} for completion 1",
    "returns_a_list": "returned [1.0, 2.0] for completion 1",
    "returns_an_empty_tuple": "returned () for completion 1",
    "returns_a_function": "returned <function returns_a_function at ",
    "returns_a_lock": "returned <unlocked _thread.lock object at ",
    "returns_complex": "returned 1j for completion 1",
    "returns_a_class": "returned <class 'float'> for completion 1",
    "returns_a_generator": "returned <generator object ",
    "returns_a_pool": "returned <Lock(owner=",
}
FINE = {
    "prints_a_gigabyte", "prints_to_stderr", "imports_torch", "forgets_a_thread", "changes_folder", "sees_a_gpu",
    "sees_a_launcher", "uses_an_alarm",
}  # fmt: skip
SESSIONS = {"starts_a_session", "starts_a_session_by_a_process_that_ends"}


def right(completions):
    return [float(text == "right") for text in completions]


@pytest.fixture(scope="module")
def executor():
    """Two functions: one that misbehaves as its completion names, and one in this process."""
    skipped = RewardFunction(f"{FILE}:judge", name="skipped", timeout_s=LIMIT, on_error="skip", max_error_rate=1.0)
    with RewardExecutor([skipped, RewardFunction(right)]) as executor:
        score_texts(executor, ["right"])  # starts the processes
        yield executor


@pytest.fixture(scope="module")
def patient():
    """The first function with a longer time limit."""
    zero = RewardFunction(f"{FILE}:judge", name="zero", timeout_s=60.0, on_error="zero", max_error_rate=1.0)
    with pytest.MonkeyPatch.context() as patch, RewardExecutor([zero]) as executor:
        patch.setenv("SLURM_JOB_ID", "1")
        patch.setenv("RANK", "0")
        score_texts(executor, ["right"])
        yield executor


def score_texts(executor, texts):
    columns = {"prompts": ["p"] * len(texts), "completions": texts, "ground_truth": ["g"] * len(texts)}
    return executor.score(columns)


def result_of(executor, name, index=1):
    """Return the result of one call."""
    row = {"prompts": ["p"], "completions": [name], "ground_truth": ["g"]}
    future = executor.submit(executor.functions[0], row, [index])
    return executor.results(executor.functions[0], [future])[0]


def test_there_are_forty_misbehaviours():
    source = FILE.read_text()
    functions = set(re.findall(r"^def ([a-z]\w+)\(\):", source, re.MULTILINE))
    assert HANGS | set(FAULTS) | FINE | SESSIONS | {"returns_nothing"} == functions
    assert len(functions) >= 40


@pytest.mark.parametrize("name", FAULTS)
def test_failure_is_described_and_the_next_completion_is_scored(executor, name):
    result = result_of(executor, name)
    assert result.message.startswith(FAULTS[name])
    assert len(result.message) < 400
    assert result_of(executor, "right").values == [1.0]


def test_calls_lost_with_a_broken_pool_are_repeated_once(executor, monkeypatch):
    """A process may end before its pool has read that it started a call."""
    unread, result = [True], PoolManager.find_expired_task

    def find(manager, worker):
        if unread and unread.pop():
            raise BrokenProcessPool("All workers expired")
        return result(manager, worker)

    monkeypatch.setattr(PoolManager, "find_expired_task", find)
    rows = [{"prompts": ["p"], "completions": [name], "ground_truth": ["g"]} for name in ("aborts", "right", "right")]
    futures = [executor.submit(executor.functions[0], row, [index]) for index, row in enumerate(rows)]
    first, *others = executor.results(executor.functions[0], futures)
    assert not unread
    assert first.message == "ended its worker process (killed by signal 6 (SIGABRT))"
    assert [other.values for other in others] == [[1.0], [1.0]]


async def loses_a_pool_of_its_own(completions):
    raise BrokenProcessPool("a child died")


def test_async_function_that_raises_a_pool_error_is_not_repeated():
    with RewardExecutor([RewardFunction(loses_a_pool_of_its_own, on_error="skip", max_error_rate=1.0)]) as executor:
        scores = score_texts(executor, ["right"])
    assert math.isnan(scores.rewards["loses_a_pool_of_its_own"].item())
    assert scores.metrics["reward_loses_a_pool_of_its_own/errors"] == (1.0, 1.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sorted(HANGS))
def test_call_that_hangs_is_killed_and_delays_no_other(executor, name):
    began = time.monotonic()
    scores = score_texts(executor, ["right", name, "right"])
    took = time.monotonic() - began
    assert took < LIMIT + (5 if name == "ignores_the_end" else 3), took
    values = scores.rewards["skipped"].tolist()
    assert math.isnan(values[1])
    assert values[::2] == [1, 1]
    assert scores.rewards["right"].tolist() == [1, 0, 1]
    assert scores.metrics["reward_skipped/timeouts"] == (1.0, 3.0)
    assert scores.metrics["reward_skipped/errors"] == (0.0, 3.0)


@pytest.mark.parametrize("name", sorted(FINE))
def test_unusual_but_valid_functions_are_scored(patient, name):
    scores = score_texts(patient, [name])
    assert scores.rewards["zero"].tolist() == [1]
    assert scores.metrics["reward_zero/errors"] == (0.0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the end of a grandchild process")
def test_processes_started_by_a_function_are_killed_with_it(executor):
    score_texts(executor, ["starts_a_process_and_waits"])
    time.sleep(0.3)
    running = [file.read_text().split("\0")[:2] for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert ["sleep", "1234"] not in running


@pytest.mark.slow
def test_processes_that_die_between_rollouts_are_replaced(patient):
    for _ in range(2):
        assert score_texts(patient, ["right"]).rewards["zero"].tolist() == [1]
        for process in multiprocessing.active_children():
            process.kill()
        time.sleep(1)
    assert score_texts(patient, ["right"]).rewards["zero"].tolist() == [1]


def test_printed_output_is_limited(tmp_path, capfd):
    with RewardExecutor([RewardFunction(f"{FILE}:judge", timeout_s=60.0)]) as executor:
        assert score_texts(executor, ["prints_a_gigabyte", "prints_to_stderr"]).rewards["judge"].tolist() == [1, 1]
    printed = capfd.readouterr()
    assert 20_000 < len(printed.out) + len(printed.err) < 21_000
    assert "printed too much" in printed.out
    assert "printed too much" in printed.err


def test_output_of_exactly_the_limit_is_whole(monkeypatch):
    monkeypatch.setattr(guard, "_MAX_OUTPUT", 6)
    written = io.StringIO()
    stream = guard.BoundedOutput(written)
    for text in ("abc", "def", ""):
        stream.write(text)
    assert written.getvalue() == "abcdef"
    for text in ("g", "h"):
        stream.write(text)
    assert written.getvalue() == "abcdef\n[this call printed too much; the rest of its output is omitted]\n"
    stream.reset()
    stream.write("1234567")
    assert written.getvalue().count("123456\n[") == 1


def test_metrics_count_none_errors_and_timeouts(executor, patient):
    texts = ["right", "raises", "returns_nothing", "exits", "right", "right", "returns_nan", "right"]
    one, other = score_texts(executor, texts), score_texts(patient, texts)
    skipped, zero = one.rewards["skipped"].tolist(), other.rewards["zero"].tolist()
    assert [math.isnan(value) for value in skipped] == [False, True, True, True, False, False, True, False]
    assert [None if math.isnan(value) else value for value in zero] == [1, 0, None, 0, 1, 1, 0, 1]
    for name, scores in (("skipped", one), ("zero", other)):
        assert scores.metrics[f"reward_{name}/errors"] == (3.0, 8.0)
        assert scores.metrics[f"reward_{name}/timeouts"] == (0.0, 8.0)
        assert scores.metrics[f"reward_{name}/not_applicable"] == (1.0, 8.0)
    assert one.metrics["reward_right/not_applicable"] == (0.0, 8.0)
    assert "reward_right/errors" not in one.metrics  # a fault of it ends the run


@pytest.mark.parametrize(("rate", "ends"), [(0.5, False), (0.49, True), (0.0, True)])
def test_more_failures_than_max_error_rate_end_the_run(rate, ends):
    def every_other(solution_str):
        return 1 / (solution_str == "right")

    executor = RewardExecutor([RewardFunction(every_other, on_error="skip", max_error_rate=rate)])
    if not ends:
        assert score_texts(executor, ["right", "wrong"]).rewards["every_other"][0] == 1
        return
    message = f"failed for 1 of 2 completions, more than its max_error_rate of {rate:g} allows; first failure: "
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
        score_texts(executor, ["right", "wrong"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_failure_in_a_worker_ends_the_run_with_its_traceback():
    with (
        RewardExecutor([RewardFunction(f"{FILE}:judge", timeout_s=60.0)]) as executor,
        pytest.raises(RuntimeError, match="reward function 'judge' raised KeyError: 'level'") as caught,
    ):
        score_texts(executor, ["right", "raises"])
    trace = str(caught.value.__cause__)
    assert "misbehaving.py" in trace
    assert 'raise KeyError("level")' in trace
    assert "lightning_rlhf" not in trace  # its author's own lines are what he can change


def test_timeout_ends_the_run_by_default():
    with (
        RewardExecutor([RewardFunction(f"{FILE}:judge", timeout_s=0.5)]) as executor,
        pytest.raises(RuntimeError, match=r"'judge' took longer than its timeout_s of 0.5 s"),
    ):
        score_texts(executor, ["sleeps"])


def test_function_that_cannot_be_pickled_raises_an_error_before_the_run():
    reward = RewardFunction(lambda completions: [1.0], name="mine", timeout_s=1.0)
    with pytest.raises(ValueError, match=r"'mine' has a timeout_s, so it runs in worker processes, .* as file.py:name"):
        reward.check([])


def test_closed_executor_can_be_used_again():
    executor = RewardExecutor([RewardFunction(f"{FILE}:judge", timeout_s=60.0), RewardFunction(right, per_sample=True)])
    for _ in range(2):
        assert score_texts(executor, ["right"]).rewards["judge"].tolist() == [1]
        executor.close()
    executor.close()


def columns_of(*texts):
    columns = {"prompts": [f"compute {text} " * 20 for text in texts], "completions": list(texts)}
    return {**columns, "ground_truth": ["g"] * len(texts), "data_source": ["easy"] * (len(texts) - 1) + ["hard"]}


def one_by_one(solution_str):
    return 1 / (solution_str == "right")


def all_at_once(completions):
    return [1 / (text == "right") for text in completions]


def not_a_number(completions):
    return [1.0 if text == "right" else math.nan for text in completions]


ONE_BY_ONE = "set per_sample: true to call the function once per completion"
ROW = r"\(completion 1 of 2, counted from 0, data_source 'hard', prompt 'compute wrong compu.{61}'\)"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"function": one_by_one}, rf"raised ZeroDivisionError: division by zero {ROW}; to continue after a failure, "),
        ({"function": one_by_one, "on_error": "zero", "max_error_rate": 0.0}, rf"failure: it raised Zero.* {ROW}$"),
        ({"function": not_a_number}, rf"returned nan for completion 1, .* {ROW}; to continue after a failure, "),
        ({"function": all_at_once}, r"raised Zero.* \(one call scored all 2 completions, so the failing one"),
        ({"function": f"{__file__}:one_by_one", "timeout_s": 60.0}, rf"raised ZeroDivision.* {ROW}; to continue "),
    ],
)  # fmt: skip
def test_error_that_ends_the_run_reports_its_row_and_the_options(options, pattern):
    with (
        RewardExecutor([RewardFunction(**options)]) as executor,
        pytest.raises(RuntimeError, match=pattern) as raised,
    ):
        executor.score(columns_of("right", "wrong"))
    message = str(raised.value)
    assert (", on_error: skip} under rewards, which leaves out the response, or on_error: zero" in message) == (
        "on_error" not in options
    )
    assert ("{function: ..., on_error" in message) == (callable(options["function"]) and "on_error" not in options)
    assert message.endswith(ONE_BY_ONE) == (options["function"] in (all_at_once, not_a_number))


def test_per_sample_is_suggested_if_one_completion_fails_all():
    texts = ["right", "right", "right", "wrong"]
    with (
        RewardExecutor([RewardFunction(all_at_once, on_error="skip")]) as executor,
        pytest.raises(RuntimeError) as raised,
    ):
        score_texts(executor, texts)
    assert "failed for 4 of 4 completions, more than its max_error_rate of 0.5 allows" in str(raised.value)
    assert str(raised.value).endswith(f"one call scored all 4 completions, so all of them fail: {ONE_BY_ONE}")
    with RewardExecutor([RewardFunction(all_at_once, on_error="skip", per_sample=True)]) as executor:
        values = score_texts(executor, texts).rewards["all_at_once"].tolist()
    assert [math.isnan(value) for value in values] == [False, False, False, True]


def test_error_of_one_source_reports_its_row_once():
    def hard(completions):
        raise KeyError("level")

    reward = RewardFunction(BySource({"easy": right, "hard": hard}), name="all", per_sample=True)
    with RewardExecutor([reward]) as executor, pytest.raises(RuntimeError) as raised:
        executor.score(columns_of("right", "wrong"))
    assert str(raised.value).startswith("reward function 'all' raised KeyError: 'level' (completion 1 of 2, ")
    assert str(raised.value).count("completion ") == 1


def running(number):
    """Return whether ``sleep <number>`` runs."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(file.read_text().split("\0")[:2])
    return ["sleep", number] in commands


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", sorted(SESSIONS))
def test_processes_in_other_sessions_are_killed_with_the_function(how):
    reward = RewardFunction(f"{FILE}:judge", name="zero", timeout_s=60.0)
    with RewardExecutor([reward]) as executor:
        assert score_texts(executor, [how]).rewards["zero"].tolist() == [1.0]
        assert running("4321")
        time.sleep(2 * SCAN_SECONDS)
    end = time.monotonic() + 10
    while running("4321") and time.monotonic() < end:
        time.sleep(0.05)
    assert not running("4321")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_processes_started_just_before_the_end_of_a_worker_are_killed(how, tmp_path):
    bystander = start_daemon("exec", tmp_path / "bystander")  # an orphan of the trainer, older than the calls
    time.sleep(0.2)
    reward = RewardFunction(f"{DAEMONS}:dies", timeout_s=60.0, on_error="skip", max_error_rate=1.0)
    pids = []
    with RewardExecutor([reward]) as executor:
        for attempt in range(3):
            path = tmp_path / str(attempt)
            scores = score_texts(executor, [f"{how} {path}"])
            assert math.isnan(scores.rewards["dies"].tolist()[0])
            pids.append(int(path.read_text()))
            end = time.monotonic() + 10
            while lives(pids[-1]) and time.monotonic() < end:
                time.sleep(0.05)
            assert not lives(pids[-1])
    assert lives(bystander)
    os.kill(bystander, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_that_the_trainer_adopted_are_killed():
    """As in a container whose first process is the trainer: orphans become its children."""
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - 0.1
    worker = 2**22 + 1  # above the largest process id
    started = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "LIGHTNING_RLHF_WORKER": str(number)})
        for number in (worker, worker + 1)
    ]
    time.sleep(0.1)  # until they have executed sleep
    guard._kill_orphans(worker, os.getpid(), since)
    assert started[0].wait(5) == -signal.SIGKILL
    assert started[1].poll() is None
    started[1].kill()
    started[1].wait()


ADOPTED = """
import json, os, sys, time
from lightning_rlhf.calls import guard
since = time.clock_gettime(time.CLOCK_BOOTTIME) - 0.1

def fork(leaves_session):
    pid = os.fork()
    if pid == 0:
        if leaves_session:
            os.setsid()
        time.sleep(60)
        os._exit(0)
    return pid

reader, writer = os.pipe()
other_worker = os.fork()
if other_worker == 0:
    os.write(writer, str(fork(True)).encode())  # a fork of another worker
    time.sleep(60)
    os._exit(0)
fork_of_other = int(os.read(reader, 20))
adopted = fork(True)  # like a fork of a dead worker, which this process has adopted
time.sleep(0.2)
guard._kill_orphans(2**22 + 1, os.getpid(), since)
time.sleep(0.2)
states = {}
for name, pid in (("other", other_worker), ("fork of other", fork_of_other), ("adopted", adopted)):
    states[name] = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
for pid in (other_worker, fork_of_other):
    os.kill(pid, 9)
print(json.dumps(states))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_plain_fork_that_the_trainer_adopted_is_killed_and_those_of_other_workers_are_not(tmp_path):
    (tmp_path / "trainer.py").write_text(ADOPTED)
    # exec keeps the process id, so that the script is the trainer of its environment.
    command = f"LIGHTNING_RLHF_TRAINER=$$ exec {sys.executable} {tmp_path / 'trainer.py'}"
    environment = {**os.environ, "PYTHONPATH": str(FILE.parents[2])}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"other": True, "fork of other": True, "adopted": False}, done.stderr


def lives(pid):
    """Return whether a process runs and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.slow
def test_process_group_that_is_killed_leaves_no_semaphores():
    script = (
        "import os, signal\n"
        "from lightning_rlhf.rewards.function import RewardFunction\n"
        "from lightning_rlhf.rewards.executor import RewardExecutor\n"
        "def fine(solution_str, ground_truth): return 1.0\n"
        "if __name__ == '__main__':\n"
        "    reward = RewardFunction('tests/rewards/misbehaving.py:judge', timeout_s=60.0)\n"
        "    with RewardExecutor([reward]) as executor:\n"
        "        executor.score({'completions': ['x'], 'ground_truth': ['x'], 'prompts': ['x']})\n"
        "        os.killpg(0, signal.SIGKILL)\n"
    )
    before = set(Path("/dev/shm").glob("sem.mp-*"))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, start_new_session=True, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -9, done.stderr.decode()
    end = time.monotonic() + 10
    while set(Path("/dev/shm").glob("sem.mp-*")) - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not set(Path("/dev/shm").glob("sem.mp-*")) - before


class OwnStop(BaseException):
    """A BaseException that is not an Exception."""


def stops(completions):
    raise OwnStop("enough")


def moves(completions):
    os.chdir("/")
    return [1.0] * len(completions)


def test_custom_base_exception_is_a_failure():
    with pytest.raises(RuntimeError, match="'stops' raised OwnStop: enough"):
        compute_reward(RewardFunction(stops), completions=["a"])
    assert math.isnan(compute_reward(RewardFunction(stops, on_error="skip", max_error_rate=1.0), completions=["a"])[0])


@pytest.mark.parametrize("options", [{}, {"per_sample": True}])
def test_changed_working_directory_is_an_error_and_restored(options):
    here = Path.cwd()
    with pytest.raises(
        RuntimeError, match="'moves' changed the working directory to /, which breaks the run's relative"
    ):
        compute_reward(RewardFunction(moves, **options), completions=["a"])
    assert Path.cwd() == here


def test_call_whose_process_is_killed_once_is_repeated(tmp_path):
    path = tmp_path / "killed"
    reward = RewardFunction("tests.rewards.misbehaving:killed_once", timeout_s=60.0, arguments={"path": str(path)})
    with RewardExecutor([reward]) as executor:
        assert score_texts(executor, ["a", "bcd"]).rewards["killed_once"].tolist() == [1.0, 3.0]
    assert path.exists()
