"""Sources of rows mixed by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.columns import Fields, source_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.samplers import shuffle
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class Mixture:
    """Mixes sources by weight. A small source is read several times in an epoch, each time in a different order.

    Args:
        weights: positive weight of each source. They need not sum to 1. Rows of other sources are bad rows.
        column: column with the name of a row's source. Dots separate the keys of nested values. None reads ``source``
            or ``data_source``, as the rest of a run does.
        rows: number of rows of an epoch. None uses the number of rows of the data.
    """

    weights: dict[str, float]
    column: str | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.weights or not all(weight > 0 for weight in self.weights.values()):
            raise UsageError(f"weights must be positive and not empty, got {self.weights}")
        check_ranges(self, rows="at least 1 or null")

    def key(self, fields: Fields) -> Any:
        """Return the name of the source."""
        name = source_of(fields.row) if self.column is None else fields.text(self.column)
        if name is None:
            raise BadRow("Mixture needs a column source or data_source, or the name of yours in its column")
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
