"""Validation metrics as people read them: each number once, with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping

BOUNDS = ("_low", "_high")  # ends of the names of an interval's bounds
CHANGE = "_change"  # end of the names of changes since the first validation
# Metrics of a reward of 0 and 1 that equal those of correct responses, by their ends.
_REPEATED = {
    "greedy": "fraction_correct_greedy",
    "sampled": "fraction_correct_sampled",
    "best@": "pass@",
    "maj@": "maj@",
}


def shown_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics of a validation that are shown: no bound, no fault that did not occur, no repeat.

    Args:
        metrics: metrics by name, those of a validation begin with ``val/``.
    """
    names = [name for name in metrics if name.startswith("val/") and not is_bound(name, metrics)]
    names = [name for name in names if not name.endswith(CHANGE)]
    zeros = [name for name in names if "/fault_" in name and not metrics[name]]
    return [name for name in names if name not in zeros and not is_repeated(name, metrics)]


def with_interval(name: str, metrics: Mapping[str, float]) -> str:
    """Return the value of a metric, and its 95 % interval if there is one; changes with their sign.

    Args:
        name: name of the metric.
        metrics: metrics by name; the bounds have the same name with ``_low`` and ``_high``.
    """
    low, high = (metrics.get(f"{name}{end}", math.nan) for end in BOUNDS)
    if math.isnan(low) or math.isnan(high):
        return number(metrics[name])
    sign = "+" if name.endswith(CHANGE) else ""
    return f"{metrics[name]:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def number(value: float) -> str:
    """Return a number with three digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def is_bound(name: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a metric is a bound of another one's interval."""
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in BOUNDS)


def is_repeated(name: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a metric has the same value as that of correct responses, and so have all means of its reward."""
    group, _, last = name.rpartition("/")
    if last == "pass@1":
        return metrics.get(f"{group}/fraction_correct_sampled") == metrics[name]
    for end, other in _REPEATED.items():
        before, ending, k = last.rpartition(f"_{end}")
        same = f"{group}/{other}{k}"
        if ending and before and (k.isdigit() or not k) and same != name and metrics.get(same) == metrics[name]:
            return _is_correctness(before, metrics)
    return False


def _is_correctness(reward: str, metrics: Mapping[str, float]) -> bool:
    """Return whether both means of a reward equal those of the correct responses, for all prompts and each source."""
    for kind in ("greedy", "sampled"):
        groups = [name.rpartition("/")[0] for name in metrics if name.endswith(f"/{reward}_{kind}")]
        for group in groups:
            if metrics[f"{group}/{reward}_{kind}"] != metrics.get(f"{group}/fraction_correct_{kind}"):
                return False
    return True
