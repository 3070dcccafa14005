"""Samplers that order rows by difficulty or mix sources by weight.

A sampler has no state: its order is a pure function of the data, the run's seed and the epoch, so a run that is resumed
in the middle of an epoch continues in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.seeding import derive_seed
from lightning_rlhf.ranges import check_ranges


@runtime_checkable
class Sampler(Protocol):
    """Protocol of an object that orders the rows of an epoch; set it in YAML by ``class_path``."""

    def key(self, fields: Fields) -> Any:
        """Return the value of a row that :meth:`order` needs, or raise :class:`BadRow`."""

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Return the row numbers of an epoch, the same number of rows in every epoch.

        Args:
            keys: keys of all rows.
            lengths: tokens of all rows.
            epoch: number of completed epochs.
        """


@dataclass(frozen=True)
class Curriculum:
    """Rows in ascending order of difficulty.

    Args:
        column: column with the difficulty as a number; dots separate the keys of nested values; None uses the length in
            tokens.
        epochs: number of epochs in this order; later epochs are shuffled.
        descending: True puts the largest number first.
    """

    column: str | None = None
    epochs: int = 1
    descending: bool = False

    def key(self, fields: Fields) -> Any:
        """Return the number in the column."""
        if self.column is None:
            return None
        return fields.number(self.column)

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Return the rows in ascending order of difficulty; rows of equal difficulty are shuffled."""
        shuffled = shuffle(len(keys), seed, epoch)
        if epoch >= self.epochs:
            return shuffled
        difficulty = lengths if self.column is None else keys
        return sorted(shuffled, key=lambda row: difficulty[row], reverse=self.descending)


@dataclass(frozen=True)
class Mixture:
    """Sources mixed by weight; a small source is read several times in an epoch, each time in a different order.

    Args:
        weights: positive weight of each source; they need not sum to 1. Rows of other sources are bad rows.
        column: column with the name of a row's source; dots separate the keys of nested values.
        rows: number of rows of an epoch; None uses the number of rows of the data.
    """

    weights: dict[str, float]
    column: str = "data_source"
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.weights or not all(weight > 0 for weight in self.weights.values()):
            raise UsageError(f"weights must be positive and not empty, got {self.weights}")
        check_ranges(self, rows="at least 1 or null")

    def key(self, fields: Fields) -> Any:
        """Return the name of the source."""
        name = fields.text(self.column)
        if name not in self.weights:
            raise BadRow(
                f"the source {name!r} has no weight; Mixture has weights for {sorted(self.weights)}",
                f"no weight for {name!r}",
            )
        return name

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Return an order in which the count of each source, at each position, is within one row of its weight."""
        names = sorted(self.weights)
        rows_of = {name: [row for row, key in enumerate(keys) if key == name] for name in names}
        if empty := [name for name in names if not rows_of[name]]:
            raise UsageError(f"Mixture has a weight for {empty[0]!r}, but no row has this source")
        total, size = sum(self.weights.values()), self.rows or len(keys)
        counts = dict.fromkeys(names, 0)
        remaining: dict[str, list[int]] = {name: [] for name in names}
        order = []
        for position in range(size):
            name = max(names, key=lambda name: self.weights[name] / total * (position + 1) - counts[name])
            if not remaining[name]:
                shuffled = shuffle(len(rows_of[name]), seed, epoch, name, counts[name])
                remaining[name] = [rows_of[name][row] for row in shuffled]
            order.append(remaining[name].pop())
            counts[name] += 1
        return order


def shuffle(size: int, seed: int, epoch: int, *purpose: int | str) -> list[int]:
    """Return a random permutation of ``range(size)`` that depends on seed, epoch and purpose."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "row order", epoch, *purpose))
    return torch.randperm(size, generator=generator).tolist()
