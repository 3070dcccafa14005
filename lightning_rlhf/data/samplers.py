"""Orders of rows other than a shuffle: from easy to hard, or sources mixed by weight.

A sampler's order is a pure function of the data, the run's seed and the epoch, so a run that is resumed in the middle
of an epoch goes on in the same order. It keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.seeding import derive_seed


@runtime_checkable
class Sampler(Protocol):
    """Anything that orders the rows of an epoch: give it in YAML by ``class_path``."""

    def key(self, fields: Fields) -> Any:
        """What is remembered of a row for :meth:`order`; it may raise :class:`BadRow`."""

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """The numbers of the rows of an epoch, equally many in each.

        Args:
            keys: of all rows.
            lengths: of all rows, in tokens.
            seed: of the run.
            epoch: how often the data had been read through before.
        """


@dataclass(frozen=True)
class Curriculum:
    """From the smallest to the largest: easy rows first.

    Args:
        column: with a number that says how hard a row is, dots leading into nested values; None takes the length in
            tokens.
        epochs: read in this order; later ones are shuffled.
        descending: the largest first.
    """

    column: str | None = None
    epochs: int = 1
    descending: bool = False

    def key(self, fields: Fields) -> Any:
        """The number in the column."""
        return None if self.column is None else fields.number(self.column)

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Ascending, equal ones in the order of a shuffle."""
        shuffled = shuffle(len(keys), seed, epoch)
        if epoch >= self.epochs:
            return shuffled
        hard = lengths if self.column is None else keys
        return sorted(shuffled, key=lambda row: hard[row], reverse=self.descending)


@dataclass(frozen=True)
class Mixture:
    """Sources mixed by weight; a small source is read several times in an epoch, each time in another order.

    Args:
        weights: name of a source to its share, positive; they need not sum to 1. Rows of other sources are bad rows.
        column: that names a row's source, dots leading into nested values.
        rows: of an epoch; None takes as many as there are.
    """

    weights: dict[str, float]
    column: str = "data_source"
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.weights or not all(weight > 0 for weight in self.weights.values()):
            raise ValueError(f"weights must be some, each positive, got {self.weights}")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}")

    def key(self, fields: Fields) -> Any:
        """The name of the source."""
        name = fields.text(self.column)
        if name not in self.weights:
            raise BadRow(f"the source {name!r} has no weight, only {sorted(self.weights)}", f"no weight for {name!r}")
        return name

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Places go to sources so that at any time each has had its share to within one row of rounding."""
        names = sorted(self.weights)
        rows_of = {name: [row for row, key in enumerate(keys) if key == name] for name in names}
        if empty := [name for name in names if not rows_of[name]]:
            raise ValueError(f"no row is of the source {empty[0]!r}, to which Mixture gives a weight")
        total, size = sum(self.weights.values()), self.rows or len(keys)
        had = dict.fromkeys(names, 0)
        passes: dict[str, list[int]] = {name: [] for name in names}
        order = []
        for place in range(size):
            name = max(names, key=lambda name: self.weights[name] / total * (place + 1) - had[name])
            if not passes[name]:
                again = shuffle(len(rows_of[name]), seed, epoch, name, had[name])
                passes[name] = [rows_of[name][row] for row in again]
            order.append(passes[name].pop())
            had[name] += 1
        return order


def shuffle(size: int, seed: int, epoch: int, *what: int | str) -> list[int]:
    """Numbers below ``size`` in an order that depends on seed, epoch and what it is for."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "row order", epoch, *what))
    return torch.randperm(size, generator=generator).tolist()
