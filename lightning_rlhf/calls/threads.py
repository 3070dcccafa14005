"""Threads for calls of user code and of servers, which do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any


class DaemonThreads:
    """A pool of daemon threads, which do not keep the process alive, unlike those of ``ThreadPoolExecutor``.

    Args:
        size: largest number of threads.
        name: name of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._running = 0
        self._queue = SimpleQueue[Any]()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Schedule a call."""
        future = Future[Any]()
        self._queue.put((future, function, arguments))
        if self._running < self._size:
            self._running += 1
            threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel the calls that have not started; each thread ends after its current call."""
        queue, self._queue = self._queue, SimpleQueue[Any]()
        try:
            while True:
                queue.get_nowait()[0].cancel()
        except Empty:
            pass
        for _ in range(self._running):
            queue.put(None)
        self._running = 0


def _work(queue: SimpleQueue[Any]) -> None:
    while call := queue.get():
        future, function, arguments = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised again where the result is read
                future.set_exception(error)
