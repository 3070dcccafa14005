"""Worker pools whose processes are killed while calls are waiting."""

import os
import signal
import time
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool

import pytest

from lightning_rlhf.calls.guard import prepare_worker
from lightning_rlhf.calls.workers import WorkerPool


@pytest.fixture
def pool():
    made = WorkerPool(1, prepare_worker)
    yield made
    made.close()


def schedule_late(pool, monkeypatch):
    """Let pebble take calls from its queue only after it has noticed the death of a process."""
    manager = pool._running.pool._pool_manager
    schedule = manager.schedule

    def late(task):
        while manager.context.alive:
            time.sleep(0.01)
        schedule(task)

    monkeypatch.setattr(manager, "schedule", late)


def test_calls_that_were_waiting_when_an_idle_process_was_killed_fail(pool, monkeypatch):
    process = pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60)
    schedule_late(pool, monkeypatch)
    calls = [pool.schedule(os.getpid, timeout_s=30.0) for _ in range(8)]
    os.kill(process, signal.SIGKILL)
    assert not wait(calls, timeout=30).not_done
    assert {type(call.exception()) for call in calls} == {BrokenProcessPool}
    assert pool.replaced == 0
    assert pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60) != process
    assert pool.replaced == 1


def test_calls_of_a_stopped_pool_are_not_failed(pool):
    """Their callbacks would start further processes."""
    pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60)
    call = pool.schedule(time.sleep, 60, timeout_s=None)
    pool.close()
    assert not call.done() or call.cancelled()
    assert not pool.active
