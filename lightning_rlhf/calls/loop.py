"""Event loops in separate threads, for ``async`` user code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
GRACE_S = 1.0  # an async call that still runs this long after its time limit is assumed to block its event loop


class EventLoopThread:
    """An event loop in a daemon thread; started when it is needed, and again after :meth:`close`.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, timeout_s: float | None = GRACE_S) -> None:
        """Cancel the tasks of the loop and end it; a loop that a call blocks ends when it is no longer blocked.

        Args:
            timeout_s: longest time to wait for the end, seconds; None waits without a limit.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then cancel its tasks."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(cancel_other_tasks())
    finally:
        loop.close()


async def cancel_other_tasks() -> None:
    """Cancel all tasks of the running loop but this one, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
