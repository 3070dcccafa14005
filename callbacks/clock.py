"""What the seconds of a step were spent on, and numbers of one rank made those of all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def means_over_ranks(
    told: Sequence[Mapping[str, tuple[float, float]]], gather: Callable[[Tensor], Tensor], device: torch.device
) -> dict[str, float]:
    """Means of what was told by any rank; one rank may have told what another has not. All ranks.

    Args:
        told: by name, a sum and the number of its terms; a name may come again.
        gather: puts the rows of all ranks below each other.
        device: of the tensors that are exchanged.
    """
    # A name travels as numbers behind its sum and count, because that is all that ranks exchange.
    rows = [[total, count, *name.encode()] for part in told for name, (total, count) in part.items()]
    width = max((len(row) for row in rows), default=2)
    table = torch.zeros(len(rows), width, dtype=torch.float64, device=device)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor(row, dtype=torch.float64)
    sums: dict[str, list[float]] = {}
    for total, count, *letters in gather(table).tolist():
        found = sums.setdefault(bytes(int(letter) for letter in letters if letter).decode(), [0.0, 0.0])
        found[0], found[1] = found[0] + total, found[1] + count
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}


def over_ranks(
    values: Mapping[str, float], reduce: Callable[[Tensor], Tensor], device: torch.device
) -> dict[str, float]:
    """Numbers of this rank made those of all, in one reduction. All ranks."""
    reduced = reduce(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
    return dict(zip(values, reduced.tolist(), strict=True))
