"""Rows by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.samplers import shuffle


@dataclass(frozen=True)
class Curriculum:
    """Orders rows by difficulty, the easiest first.

    Args:
        column: column with the difficulty as a number. Dots separate the keys of nested values. None uses the length in
            tokens.
        epochs: number of epochs in this order. Later epochs are shuffled.
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
