"""Clock for the parts of a step, and reductions of named numbers over ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.strategies.ranks import from_all_ranks


class Clock:
    """Accumulates seconds by name: those of a step, and those since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.total: dict[str, float] = defaultdict(float)

    def start_step(self) -> None:
        """Begin to count the seconds of another step."""
        self.seconds.clear()

    def add_name(self, name: str) -> None:
        """Add a name without seconds; all ranks log the same names."""
        self.seconds[name] += 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time inside a ``with`` block."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.seconds[name] += seconds
        self.total[name] += seconds


def means_over_ranks(metrics: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Average metrics over ranks, which may have different names. All ranks.

    Args:
        metrics: sums and counts by name, of this rank; a name may occur several times.
    """
    sums = defaultdict[str, float](float)
    counts = defaultdict[str, float](float)
    for part in chain.from_iterable(from_all_ranks([dict(part) for part in metrics])):
        for name, (total, count) in part.items():
            sums[name] += total
            counts[name] += count
    return {name: sums[name] / count for name, count in sorted(counts.items()) if count}


def sum_over_ranks(values: Mapping[str, float], ranks: DataRanks, device: torch.device) -> dict[str, float]:
    """Sum numbers over ranks, in one reduction; the names are the same on all ranks. All ranks."""
    total = ranks.sum(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
    return dict(zip(values, total.tolist(), strict=True))


def max_over_ranks(values: Mapping[str, float], ranks: DataRanks, device: torch.device) -> dict[str, float]:
    """Take the maximum of numbers over ranks, in one reduction; the names are the same on all ranks. All ranks."""
    largest = ranks.max(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
    return dict(zip(values, largest.tolist(), strict=True))
