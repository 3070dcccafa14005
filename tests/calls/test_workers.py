"""Worker pools whose processes are killed while calls are waiting."""

import os
import signal
import threading
import time
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool

import pytest
from pebble import ProcessExpired

from lightning_rlhf.calls import workers
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


def test_reader_that_fails_after_the_pool_was_stopped_fails_no_call(pool, monkeypatch):
    """The pipe that it reads is closed under it, at an unlucky moment."""
    pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60)
    manager = pool._running.pool._pool_manager
    call = pool.schedule(time.sleep, 60, timeout_s=None)
    reads = threading.Event()

    def fails_when_stopped(timeout):
        reads.set()
        while manager.context.alive:
            time.sleep(0.01)
        raise BrokenProcessPool

    monkeypatch.setattr(manager.worker_manager, "receive", fails_when_stopped)
    assert reads.wait(10)
    pool.close()
    assert not call.done()


def test_call_that_ended_its_process_is_known_although_the_callback_of_another_is_still_running(pool):
    """Pebble reads that a call began in the thread that runs callbacks."""
    pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60)
    first = pool.schedule(time.sleep, 0.2, timeout_s=30.0)
    first.add_done_callback(lambda _: time.sleep(1.0))
    second = pool.schedule(os._exit, 3, timeout_s=30.0)
    third = pool.schedule(os.getpid, timeout_s=30.0)
    error = second.exception(timeout=30)
    assert isinstance(error, ProcessExpired)
    assert error.exitcode == 3
    assert third.result(timeout=60) != error.pid
    assert (pool.active, pool.replaced) == (True, 0)


def test_end_of_a_process_is_reported_although_the_reader_waits(pool, monkeypatch):
    """A process can end in the middle of a message."""
    monkeypatch.setattr(workers, "_READING_S", 0.2)
    pool.schedule(os.getpid, timeout_s=30.0).result(timeout=60)
    first = pool.schedule(time.sleep, 0.2, timeout_s=30.0)
    first.add_done_callback(lambda _: time.sleep(1.0))
    second = pool.schedule(os._exit, 3, timeout_s=30.0)
    assert isinstance(second.exception(timeout=30), BrokenProcessPool)
