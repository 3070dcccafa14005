"""Clock: what the seconds of a step were spent on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by name; a name used again goes on counting."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time spent inside ``with``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started
