"""What the checks compare: how far a metric has moved since the start of a run, and by how many standard errors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from lightning_rlhf.callbacks.records.run_history import FIRST_STEPS, Row, RunHistory, is_validation

WINDOW = 10  # steps at the start and at the end that a shift compares
_LATER = 40  # steps after the first ones whose noise is measured
_INTERVAL = 2 * 1.96  # standard errors between the bounds of a 95 % interval
Failure = tuple[str, float, float, str, str]  # metric, value, bound, message, remedy


@dataclass(frozen=True)
class Shift:
    """Change of a mean since the start of a run.

    Args:
        error: standard error of the change.
    """

    before: float
    now: float
    error: float

    @property
    def errors(self) -> float:
        """Number of standard errors of the change, with its sign; NaN if it is unknown."""
        change = self.now - self.before
        if self.error:
            return change / self.error
        return change * math.inf if change else 0.0

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.now:.3g}"


UNKNOWN = Shift(math.nan, math.nan, math.nan)


@dataclass
class HealthHistory(RunHistory):
    """The metrics of a run, with those of its first :data:`WINDOW` steps and the weights of all rewards.

    Args:
        weights: weight of each reward by name; one with weight 0 is held out.
        early: metrics of the first steps.
        later: metrics of the last steps that follow those.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    early: list[Row] = field(default_factory=list)
    later: deque[Row] = field(default_factory=lambda: deque(maxlen=_LATER))

    def add(self, row: Row) -> None:
        """Add the metrics of a training step."""
        self.recent.append(row)
        if len(self.first) < FIRST_STEPS:
            self.first.append(row)
        if len(self.early) < WINDOW:
            self.early.append(row)
        else:
            self.later.append(row)

    def shift(self, metric: str) -> Shift:
        """Return the change of a metric since the start; NaN if it is unknown.

        For training steps it is the mean of the last :data:`WINDOW` steps minus that of the first. Its error comes from
        the differences of successive steps, which a trend among the first steps does not inflate. For a validation it
        is the logged change since the first one.
        """
        if is_validation(metric):
            return self._validation_shift(metric)
        if len(self.later) < WINDOW:
            return UNKNOWN
        later = [*self.later]
        early, late = known(self.early, metric), known(later[-WINDOW:], metric)
        if min(len(early), len(late)) < WINDOW // 2:
            return UNKNOWN
        error = math.sqrt(noise(early) / len(early) + noise(known(later, metric)) / len(late))
        return Shift(fmean(early), fmean(late), error)

    def _validation_shift(self, metric: str) -> Shift:
        last = self.validations[-1] if self.validations else {}
        value, change, low, high = (
            last.get(f"{metric}{end}", math.nan) for end in ("", "_change", "_change_low", "_change_high")
        )
        return Shift(value - change, value, (high - low) / _INTERVAL)


def noise(values: Sequence[float]) -> float:
    """Return the variance of values around their trend: half the mean square of the differences of successive ones.

    See "The mean square successive difference", von Neumann et al. 1941.
    """
    return fmean((after - before) ** 2 for before, after in pairwise(values)) / 2


def known(rows: Iterable[Row], metric: str) -> list[float]:
    """Return the values of a metric without the rows that lack it, or have NaN."""
    values = (row.get(metric, math.nan) for row in rows)
    return [value for value in values if not math.isnan(value)]
