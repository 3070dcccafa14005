"""Threads that a process does not wait for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Does jobs, some at a time. A thread pool of Python's would keep the process until a job that hangs returns.

    Args:
        count: of jobs at a time.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name, self._running = count, name, 0
        self._jobs = SimpleQueue[_Job | None]()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have a function called."""
        future = Future[_T]()
        self._jobs.put((future, function, arguments))
        if self._running < self._count:
            self._running += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Give up the jobs that nobody has begun; each thread ends behind its own."""
        try:
            while job := self._jobs.get_nowait():
                job[0].cancel()
        except Empty:
            pass
        for _ in range(self._running):
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            future, function, arguments = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:  # whoever waits for it is told, and other jobs are done
                    future.set_exception(error)
