"""The executor leaves no event loop, task, blocking thread or process behind."""

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading

import pytest

from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.extras.rewards.sources import BySource
from lightning_rlhf.rewards.executor import RewardExecutor, compute_reward
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rewards.results import AbortRun

HANGING = """
import time
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction

def hangs(completions):
    time.sleep(1000)

with RewardExecutor([RewardFunction(hangs, per_sample=True)]) as executor:
    executor.submit(executor.functions[0], {"completions": ["a"]}, [0])
"""


async def quits(completions):
    sys.exit(3)


async def interrupts(completions):
    raise KeyboardInterrupt


async def cancels(completions):
    raise asyncio.CancelledError


async def waits(completions):
    await asyncio.sleep(1000)


def spends(completions):
    raise AbortRun("all is spent")


@pytest.mark.parametrize(
    ("function", "message"),
    [(quits, "raised SystemExit: 3"), (interrupts, "raised KeyboardInterrupt: "), (cancels, "cancelled itself")],
)
def test_async_function_that_stops_its_event_loop_is_a_failure(function, message):
    messages = []

    def judge():  # elsewhere, so that a test that hangs ends
        with pytest.raises(RuntimeError) as caught:
            compute_reward(RewardFunction(function), completions=["a"])
        messages.append(str(caught.value))

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    thread.join(20)
    (error,) = messages
    assert error.startswith(f"reward function {function.__name__!r} {message} (")


def test_pending_async_calls_are_cancelled_and_their_thread_ends(caplog):
    before = threading.active_count()
    with RewardExecutor([RewardFunction(waits, per_sample=True)]) as executor:
        executor.launch(0, {"completions": ["a"]})
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    gc.collect()
    assert caplog.text == ""  # asyncio would log tasks that were not awaited


@pytest.mark.slow
def test_hanging_function_does_not_prevent_the_end_of_the_process():
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=100)  # or it raises


def test_daemon_threads_limit_concurrency_and_cancel_pending_calls():
    threads, go = DaemonThreads(2, "test"), threading.Event()
    running = [threads.submit(go.wait) for _ in range(2)]
    waiting = [threads.submit(int, text) for text in ("1", "2")]
    assert not any(future.done() for future in waiting)
    threads.close()
    assert all(future.cancelled() for future in waiting)
    go.set()
    assert [future.result(10) for future in running] == [True, True]
    again = DaemonThreads(1, "test")
    broken, fine = again.submit(int, "x"), again.submit(int, "7")
    assert fine.result(10) == 7
    assert isinstance(broken.exception(), ValueError)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("options", [{}, {"per_sample": True}, {"timeout_s": 60.0}])
def test_abort_run_ends_the_run_from_every_executor(options):
    reward = RewardFunction(spends, on_error="skip", max_error_rate=1.0, **options)
    with pytest.raises(AbortRun, match="'spends' raised AbortRun: all is spent"):
        compute_reward(reward, completions=["a"])


def test_abort_run_ends_the_run_from_a_function_of_one_source():
    reward = RewardFunction(BySource({"*": spends}), on_error="skip", max_error_rate=1.0)
    with pytest.raises(AbortRun, match="all is spent"):
        compute_reward(reward, completions=["a"], data_source=["x"])


class Holding:
    """Counts calls of close."""

    closed = 0

    def __call__(self, completions):
        return [0.0] * len(completions)

    def close(self):
        self.closed += 1


def test_closing_a_reward_closes_its_function():
    plain, of_source = Holding(), Holding()
    for reward in (RewardFunction(plain), RewardFunction(BySource({"*": of_source})), RewardFunction(spends)):
        reward.close()
    assert (plain.closed, of_source.closed) == (1, 1)


@pytest.mark.slow
def test_math_workers_end_with_the_run():
    pytest.importorskip("math_verify")
    from lightning_rlhf.extras.rewards.math import MathReward

    before = len(multiprocessing.active_children())
    reward = RewardFunction(MathReward(workers=1))
    for _ in range(2):
        assert compute_reward(reward, completions=["5"], ground_truth=["5"]).tolist() == [1]
        assert len(multiprocessing.active_children()) == before + 1
        reward.close()
        assert len(multiprocessing.active_children()) == before
