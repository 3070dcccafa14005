"""How much each row should be read, by what the run has observed of it: pools, gates, retired rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.samplers.history import RowHistory
from lightning_rlhf.ranges import check_ranges

_MOST_LEVELS = 100


class RowWeights(Protocol):
    """Protocol of a part of :class:`~lightning_rlhf.extras.samplers.adaptive.Adaptive`."""

    def key(self, fields: Fields) -> Any:
        """Return the value of a row that :meth:`weights` needs, or raise :class:`BadRow`."""

    def weights(self, history: RowHistory, keys: Sequence[Any]) -> Tensor:
        """Return the (N,) float64 weight of each row, at least 0, as a function of its arguments only.

        Args:
            history: what the run has observed, on the CPU.
            keys: keys of all rows.
        """


@dataclass(frozen=True)
class Pools:
    """Weighs rows by how many of their responses were solved.

    Args:
        easy: weight of rows with a solve rate above ``high``.
        useful: weight of rows between ``low`` and ``high``.
        impossible: weight of rows below ``low``. Keep it above 0, because the policy improves.
        unseen: weight of rows without a group.
        low: smallest solve rate of useful rows, in [0, 1].
        high: largest solve rate of useful rows, in [0, 1].
    """

    easy: float = 0.1
    useful: float = 1.0
    impossible: float = 0.1
    unseen: float = 1.0
    low: float = 0.05
    high: float = 0.95

    def __post_init__(self) -> None:
        check_ranges(self, easy="at least 0", useful="at least 0", impossible="at least 0", unseen="at least 0")
        check_ranges(self, low="in [0, 1]", high="in [0, 1]")
        if self.low > self.high:
            raise UsageError(f"low of Pools must be at most high, got {self.low} and {self.high}")

    def key(self, fields: Fields) -> Any:
        """Return nothing, because no column is read."""

    def weights(self, history: RowHistory, keys: Sequence[Any]) -> Tensor:
        """Return the weight of each row's pool."""
        rate = history.solve_rate
        weights = torch.full_like(rate, self.useful)
        weights[rate < self.low] = self.impossible
        weights[rate > self.high] = self.easy
        weights[~history.observed] = self.unseen
        return weights


@dataclass(frozen=True)
class Learnability:
    """Weighs rows by ``p (1 - p)``, with p the probability that a response is solved (Foster et al. 2025).

    This is the variance of the reward, which the gradient of GRPO is proportional to. It is its mean over a Beta
    distribution of p, so that rows with few responses keep a weight: with a solved and b other responses,
    ``(1 + a) (1 + b) / ((2 + a + b) (3 + a + b))``, which is 1/6 for rows without a group.

    Args:
        least: smallest weight as a fraction of the largest, in [0, 1], so that no row is left out.
    """

    least: float = 0.05

    def __post_init__(self) -> None:
        check_ranges(self, least="in [0, 1]")

    def key(self, fields: Fields) -> Any:
        """Return nothing, because no column is read."""

    def weights(self, history: RowHistory, keys: Sequence[Any]) -> Tensor:
        """Return the mean of ``p (1 - p)`` of each row."""
        solved, unsolved = history.solved + 1, history.unsolved + 1
        total = solved + unsolved
        weights = solved * unsolved / (total * (total + 1))
        return weights.clamp(min=self.least * float(weights.max()))


@dataclass(frozen=True)
class Gates:
    """Lets rows of a higher level in when those of the level below are solved often enough.

    A level is open while all levels below it have a mean solve rate of ``solved`` or more, over their rows that were
    observed, at least ``rows`` of them. If the rate falls below it again, the levels above close.

    Args:
        column: column with the level as a number; its different values are the levels. Dots separate the keys of nested
            values.
        solved: mean solve rate that opens the next level, in [0, 1].
        rows: smallest number of observed rows of a level, at least 1. If it has fewer rows, all of them.
    """

    column: str
    solved: float = 0.7
    rows: int = 16

    def __post_init__(self) -> None:
        check_ranges(self, solved="in [0, 1]", rows="at least 1")

    def key(self, fields: Fields) -> Any:
        """Return the level."""
        return fields.number(self.column)

    def weights(self, history: RowHistory, keys: Sequence[Any]) -> Tensor:
        """Return 1 for rows of open levels and 0 for others."""
        levels = torch.tensor(keys, dtype=torch.float64)
        weights = torch.zeros(len(history), dtype=torch.float64)
        different = levels.unique()  # ascending
        if len(different) > _MOST_LEVELS:
            raise UsageError(
                f"column {self.column!r} of Gates has {len(different)} different values, more than {_MOST_LEVELS} "
                f"levels: round them"
            )
        for level in different:
            rows = levels == level
            weights[rows] = 1.0
            seen = rows & history.observed
            if seen.sum() < min(self.rows, int(rows.sum())) or history.solve_rate[seen].mean() < self.solved:
                break
        return weights


@dataclass(frozen=True)
class Retire:
    """Leaves out rows whose responses were all solved several times in a row.

    Args:
        groups: successive groups with solved responses only that retire a row, at least 1.
        rest: steps after which a retired row is read again, in case the policy has forgotten it, at least 1. None never
            reads it again.
    """

    groups: int = 2
    rest: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, groups="at least 1", rest="at least 1 or null")

    def key(self, fields: Fields) -> Any:
        """Return nothing, because no column is read."""

    def weights(self, history: RowHistory, keys: Sequence[Any]) -> Tensor:
        """Return 0 for retired rows and 1 for others."""
        is_retired = history.streak >= self.groups
        if self.rest is not None:
            is_retired &= history.step - history.last_step <= self.rest
        return (~is_retired).double()
