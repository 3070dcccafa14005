"""The metrics of a run that health checks read: its first and last steps, and its validations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

FIRST_STEPS = 3
VALIDATION_MARK = "validation"  # column of metrics.csv, 1 for a validation without metrics that begin with val/
_RECENT_STEPS = 40
Row = Mapping[str, float]


def is_validation(metric: str) -> bool:
    """Return whether only validations have a metric."""
    return metric.startswith("val/") or metric == VALIDATION_MARK


@dataclass
class RunHistory:
    """The first and the last metrics of a run, for health checks.

    Args:
        rewards: names of the reward functions whose weight is not 0.
        bounds: lowest accuracies of a reward model before PPO uses it, by metric.
        first: metrics of the first steps.
        recent: metrics of the last steps.
        validations: metrics of all validations.
    """

    rewards: Sequence[str] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    first: list[Row] = field(default_factory=list)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    validations: list[Row] = field(default_factory=list)

    def last(self, metric: str, count: int) -> list[float]:
        """Return the values of a metric in the last ``count`` steps; empty if it has fewer values or NaN."""
        rows = list(self.recent)[-count:]
        return values_of(rows, metric) if len(rows) == count else []

    def mean(self, metric: str, count: int) -> float:
        """Return the mean of a metric over the last ``count`` steps; NaN if it has fewer values or NaN."""
        values = self.last(metric, count)
        return fmean(values) if values else math.nan

    def at_start(self, metric: str) -> float:
        """Return the mean of a metric over the first steps; NaN before their end."""
        values = values_of(self.first, metric)
        return fmean(values) if len(values) == FIRST_STEPS else math.nan

    def has_risen(self, reward: float) -> bool:
        """Return whether a mean reward exceeds that of the first steps by half its standard deviation there.

        Until as many steps have followed them, it is compared with the first step.
        """
        first = self.first if len(self.recent) >= 2 * FIRST_STEPS else self.first[:1]
        means, deviations = (values_of(first, name) for name in ("reward/mean", "reward/std"))
        return bool(means and deviations) and reward > fmean(means) + fmean(deviations) / 2


def values_of(rows: Sequence[Row], metric: str) -> list[float]:
    """Return the values of a metric; an empty list if one is missing or NaN."""
    values = [row.get(metric, math.nan) for row in rows]
    return [] if any(math.isnan(value) for value in values) else values
