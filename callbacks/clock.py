"""What the seconds of a step were spent on, and numbers of one rank made those of all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


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


def over_ranks(
    values: Mapping[str, float], reduce: Callable[[Tensor], Tensor], device: torch.device
) -> dict[str, float]:
    """Numbers of this rank made those of all, in one reduction. All ranks."""
    reduced = reduce(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
    return dict(zip(values, reduced.tolist(), strict=True))
