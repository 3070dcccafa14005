"""Waiting for many futures and hearing of each as it is done."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any


def as_they_come(futures: Collection[Future[Any]], seconds: float) -> Iterator[Future[Any] | None]:
    """Each future once it is done, and None every so often while some are not.

    Args:
        futures: in any state.
        seconds: between two None.
    """
    arrived = SimpleQueue[Future[Any]]()
    missing = len(futures)
    for future in list(futures):
        future.add_done_callback(arrived.put)
    impatient = time.monotonic() + seconds
    while missing:
        try:
            future = arrived.get(timeout=max(impatient - time.monotonic(), 0))
        except Empty:
            impatient += seconds
            yield None
        else:
            missing -= 1
            yield future
