"""Which health checks ran on the metrics of a run, and why the others did not."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_rlhf.callbacks.records.run_history import Row, is_validation
from lightning_rlhf.extras.health.history import WINDOW
from lightning_rlhf.extras.health.monitor import CHECKS, Finding

_CHOSEN = "dynamic sampling chooses prompts by their rewards, whose means do not compare"
_REASONS = {
    "second reward": _CHOSEN,
    "rewarded form": _CHOSEN,
    "one form": _CHOSEN,
    "clipping": "the loss clips ratios of whole responses, which happens far more often",
    "engine and actor": "with max_staleness, the engine's weights are older than the actor's",
}


@dataclass(frozen=True)
class _Need:
    """Metrics that a check compares.

    Args:
        steps: steps in a row, or validations, that have these metrics.
        metrics: names of the metrics; ``a|b`` is the first one that the run logs.
    """

    steps: int
    metrics: tuple[str, ...]


_NEEDS = {
    "lost reward": _Need(5, ("reward/mean", "reward/std")),
    "equal groups": _Need(5, ("group/equal_reward_fraction", "reward/mean", "reward/std")),
    "KL to the reference": _Need(1, ("kl/ref", "rollout/response_tokens_mean")),
    "entropy collapse": _Need(20, ("policy/entropy", "reward/mean", "reward/std")),
    "length drift": _Need(5, ("rollout/response_tokens_mean",)),
    "truncation": _Need(3, ("rollout/truncated_fraction",)),
    "clipping": _Need(3, ("policy/clip_fraction",)),
    "engine and actor": _Need(3, ("rollout/logprob_diff_mean",)),
    "critic": _Need(20, ("value/explained_variance",)),
    "over-optimisation": _Need(3, ("val/fraction_correct_sampled|val/fraction_correct_greedy|val/score_sampled",)),
    "worse validation": _Need(
        2, ("val/fraction_correct_sampled_low|val/fraction_correct_greedy_low|val/score_sampled_low",)
    ),
    "second reward": _Need(2 * WINDOW, ("reward/mean",)),
    "rewarded form": _Need(2 * WINDOW, ("reward/mean", "form/repetition_mean")),
    "one form": _Need(2 * WINDOW, ("reward/mean", "form/same_text_fraction|form/common_text_fraction")),
    "reward model": _Need(1, ("val/policy_score_mean",)),
    "rising loss": _Need(10, ("train/loss",)),
    "gradient spike": _Need(20, ("grad_norm/actor|grad_norm/critic",)),
    "waiting": _Need(5, ("time/step_s",)),
}


def check_states(
    rows: Sequence[tuple[int, Row]],
    findings: Sequence[Finding],
    rewards: Sequence[str] = (),
    skipped: Collection[str] = (),
    bounds: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[dict[str, str]]:
    """Return name, state and a note of each health check, in the order of the checks.

    The state is ``failed``, ``passed``, ``no data`` (a metric is not logged), ``too early`` (more steps are needed) or
    ``not applicable``.

    Args:
        rows: step and metrics of each row, without missing values and NaN.
        findings: checks that failed.
        rewards: names of the reward functions whose weight is not 0.
        skipped: names of checks that do not apply to the run.
        bounds: lowest accuracies of a reward model before PPO uses it, by metric.
        weights: weight of each reward by name.
    """
    failed = {finding.check: finding for finding in findings}
    parts: dict[bool, list[Row]] = {True: [], False: []}
    for _, row in rows:
        parts[any(is_validation(name) for name in row)].append(row)
    states = []
    for name in CHECKS:
        if name in failed:
            state, note = _of_finding(failed[name], rows)
        elif name in skipped:
            state, note = "not applicable", _REASONS.get(name, "")
        elif name == "constant reward":
            state, note = _of_rewards(parts, rewards)
        elif name == "reward model" and not bounds:
            state, note = "not applicable", "only for a reward model with PolicyCheck"
        elif name == "second reward" and (not weights or (len(weights) == 1 and all(weights.values()))):
            state, note = "not applicable", "the run has one reward: add one with weight 0 that measures the task"
        else:
            state, note = _state(_need(name, rewards, weights or {}), parts)
            if name == "critic" and state == "passed" and _is_exempt(parts[False]):
                state, note = "not applicable", f"{note}, but rewards vary less than half as much as at the start"
        states.append({"name": name, "state": state, "note": note})
    return states


def _need(name: str, rewards: Sequence[str], weights: Mapping[str, float]) -> _Need:
    """Return the metrics of a check; validations of a run with one reward function have its mean in any case."""
    need = _NEEDS[name]
    if name == "second reward":
        return _Need(need.steps, (f"reward/{min(weights, key=lambda reward: abs(weights[reward]))}",))
    if name in ("over-optimisation", "worse validation") and len(rewards) == 1:
        (metrics,) = need.metrics
        ending = "_low" if metrics.endswith("_low") else ""
        return _Need(need.steps, (f"{metrics}|val/{rewards[0]}_sampled{ending}",))
    return need


def _state(need: _Need, parts: Mapping[bool, Sequence[Row]]) -> tuple[str, str]:
    """Return the state of a check that did not fail, and a note.

    Args:
        need: metrics that the check compares.
        parts: rows of validations (True) and of training steps (False).
    """
    rows = parts[need.metrics[0].startswith("val/")]
    logged = {name for row in rows for name in row}
    names = [
        next((alternative for alternative in each.split("|") if alternative in logged), each) for each in need.metrics
    ]
    missing = [name.replace("|", " or ") for name in names if name not in logged]
    if missing and parts[False]:
        hint = ""
        if "val/fraction_correct" in missing[0]:
            hint = ": set val_metric of RolloutLoop"
        return "no data", f"{missing[0]} is not logged{hint}"
    longest = current = 0
    for row in rows:
        current = current + 1 if all(name in row for name in names) else 0
        longest = max(longest, current)
    if longest < need.steps:
        unit = "validations" if need.metrics[0].startswith("val/") else "steps"
        return "too early", f"{longest} of {need.steps} {unit}"
    last = next(row[names[0]] for row in reversed(rows) if names[0] in row)
    return "passed", f"{names[0]} {last:.4g}"


def _of_finding(finding: Finding, rows: Sequence[tuple[int, Row]]) -> tuple[str, str]:
    """Return the state of a check that failed: ``recovered`` if the last value of its metric is within the bound."""
    values = [row[finding.metric] for _, row in rows if finding.metric in row]
    if finding.value == finding.bound:
        within = bool(values) and values[-1] != finding.bound
    else:
        within = bool(values) and (values[-1] < finding.bound) == (finding.value > finding.bound)
    if not within or finding.check == "gradient spike":  # spikes are short
        return "failed", f"step {finding.step}"
    return "recovered", f"failed at step {finding.step}; {finding.metric} is {values[-1]:.4g} now"


def _of_rewards(parts: Mapping[bool, Sequence[Row]], rewards: Sequence[str]) -> tuple[str, str]:
    """Return the state of the check of the reward functions, which compares the first steps."""
    if not rewards:
        return "not applicable", "the run has no reward function with a weight"
    metrics = [name for reward in rewards for name in (f"reward/{reward}", f"reward/{reward}_std")]
    state, note = _state(_Need(3, tuple(metrics)), parts)
    if state == "passed":
        note = "rewards of the first 3 steps are not all equal"
    return state, note


def _is_exempt(rows: Sequence[Row]) -> bool:
    """Return whether the critic predicts badly in the last steps, in which rewards vary too little for its check."""
    values = [row["value/explained_variance"] for row in rows[-5:] if "value/explained_variance" in row]
    deviations = [row.get("reward/std", math.nan) for row in rows]
    return bool(values) and fmean(values) < -0.1 and fmean(deviations[-5:]) < fmean(deviations[:3]) / 2
