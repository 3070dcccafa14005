"""Waits for futures that log a line every minute."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
INTERVAL_SECONDS = 60.0


def wait_logged(
    futures: Sequence[Future[T]],
    what: str,
    details: str = "",
    seconds: float = math.inf,
    return_when: str = ALL_COMPLETED,
) -> set[Future[T]]:
    """Wait for futures, and log a line every minute.

    Args:
        futures: futures in any state.
        what: words after "Waiting for", or after "Waiting for 2 of 3" if there are several futures.
        details: end of the line, which begins with its punctuation.
        seconds: time limit.
        return_when: ``ALL_COMPLETED`` or ``FIRST_EXCEPTION``.

    Returns:
        The futures that are not done, at the time limit or when one has failed.
    """
    began, pending = time.monotonic(), set(futures)
    while True:
        left = began + seconds - time.monotonic()
        done, pending = wait(pending, max(0.0, min(INTERVAL_SECONDS, left)), return_when)
        waited = time.monotonic() - began
        failed = return_when == FIRST_EXCEPTION and any(future.exception() for future in done)
        if not pending or failed or waited >= seconds:
            return pending
        count = f"{len(pending)} of {len(futures)} " if len(futures) > 1 else ""
        log.info("Waiting for %s%s for %.0f s%s.", count, what, waited, details)


def results_logged(futures: Sequence[Future[T]], what: str, details: str = "") -> list[T]:
    """Return the results of futures in their order, or raise as soon as one has failed; log a line every minute.

    Arguments as of :func:`wait_logged`.
    """
    wait_logged(futures, what, details, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done() and (error := future.exception()) is not None:
            raise error  # not by future.result(): the traceback should end in this package
    return [future.result() for future in futures]
