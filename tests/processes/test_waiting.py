"""Waits end with the futures, the first failure or the time limit, and are logged at intervals."""

import logging
import threading
import time
from concurrent.futures import Future

import pytest

from lightning_rlhf.processes import waiting
from lightning_rlhf.processes.waiting import results_logged, wait_logged


@pytest.fixture(autouse=True)
def lines(monkeypatch, caplog):
    """Log lines, which come every 50 ms."""
    monkeypatch.setattr(waiting, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    caplog.set_level("INFO", "lightning_rlhf")
    return lambda: [record.getMessage() for record in caplog.records]


def done(value):
    future = Future()
    future.set_result(value)
    return future


def later(seconds, error=None):
    """Return a future that has a result, or fails, after some seconds."""
    future = Future()
    finish = (lambda: future.set_exception(error)) if error else (lambda: future.set_result("late"))
    threading.Timer(seconds, finish).start()
    return future


def test_results_are_in_order_and_waiting_is_logged(lines):
    assert results_logged([later(0.3), done("early")], "texts", "; the server is x") == ["late", "early"]
    assert 2 <= len(lines()) <= 6
    assert set(lines()) == {"Waiting for 1 of 2 texts for 0 s; the server is x."}


def test_one_future_has_no_count(lines):
    assert results_logged([later(0.2)], "the engine to be ready") == ["late"]
    assert lines()[0] == "Waiting for the engine to be ready for 0 s."


def test_finished_futures_are_not_waited_for(lines):
    assert results_logged([done(1), done(2)], "texts") == [1, 2]
    assert results_logged([], "texts") == []
    assert wait_logged([], "texts", seconds=0) == set()
    assert lines() == []


def test_first_failure_is_raised_while_others_are_pending():
    began, error = time.monotonic(), ValueError("lost")
    with pytest.raises(ValueError, match="lost") as raised:
        results_logged([Future(), done(1), later(0.2, error)], "texts")
    assert raised.value is error
    assert 0.2 <= time.monotonic() - began < 5


def test_time_limit_returns_what_is_missing(lines):
    began, never = time.monotonic(), Future()
    failed = later(0.1, ValueError())
    assert wait_logged([done(1), never, failed], "calls", seconds=0.4) == {never}
    assert 0.4 <= time.monotonic() - began < 5
    assert lines()[0] == "Waiting for 2 of 3 calls for 0 s."
    assert lines()[-1] == "Waiting for 1 of 3 calls for 0 s."
    assert wait_logged([later(0.1)], "calls", seconds=30) == set()
