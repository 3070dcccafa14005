"""Which way a metric improves, for callbacks that keep the best checkpoint or end a run."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["min", "max"]

_RULES: tuple[tuple[Direction, str], ...] = (
    ("min", r"(^|/)(truncated|missing)_fraction$"),
    ("max", r"^reward/"),
    ("min", r"(^|/|_)(loss|errors?|timeouts|divergence|ppl|log_ppl|perplexity)($|/|_)"),
    ("min", r"(^|/|_)kl($|/|_)"),
    ("max", r"(^|/|_)(reward|score_margin|pair_accuracy|fraction_correct|accuracy)($|/|_)"),
    ("max", r"/(pass|maj)@\d+$"),
    ("max", r"/[^/]+_(greedy|sampled|(best|worst|maj)@\d+)$"),
    ("max", r"/(score_orders_correct_first|policy_order|explained_variance)$"),
)
# Of a metric that has a direction, these parts have none: the ends of intervals, deviations, and differences of both.
_WITHOUT = r"((_|/)std|_low|_high|coef|equal_reward_fraction|reward_std_mean|reward_rejected|not_applicable)$"


# Metrics of this package alone: users and environments name no metric so.
_OWN = (
    r"^(train|val)/(loss|log_ppl|ppl|pair_accuracy|score_margin|fraction_correct\w*|score_(greedy|sampled))$"
    r"|^kl/|^reward/(mean|generated_mean|max|min)$"
)


def is_own(metric: str) -> bool:
    """Return whether a metric is one of this package, whose direction no other meaning of its name can change."""
    return re.search(_OWN, metric) is not None


def direction_of(metric: str) -> Direction | None:
    """Return whether a smaller or a larger value of a metric is better; None if that is not known.

    Losses, errors and KL improve downwards, rewards and accuracies upwards.

    Args:
        metric: name of the metric.
    """
    if re.search(_WITHOUT, metric):
        return None
    return next((direction for direction, pattern in _RULES if re.search(pattern, metric)), None)
