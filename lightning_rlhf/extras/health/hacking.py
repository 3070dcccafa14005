"""Checks for reward hacking: a reward that rises while another one falls, or alone and by the form of responses."""

from __future__ import annotations

import math
from statistics import fmean

from lightning_rlhf.extras.health.forms import FORMS, MEASURES
from lightning_rlhf.extras.health.history import Failure, HealthHistory, Shift, known

# Standard errors of a change that is no chance. The checks look at each step: a reward that stays as it was falls by 5
# at some step in 1 of 500 simulated runs of 100 steps, and in 1 of 160 of 1,000 steps; by 4 in 1 of 110 and 1 of 20.
CLEAR = 5.0
# Standard errors of a rise from which a second measure counts as one that did not follow: had it risen half as much, it
# would exceed _FOLLOWED 39 times out of 40.
_VERY_CLEAR = 8.0
_FOLLOWED = 2.0
# Correlation of form and reward among the responses to a prompt: the form explains half of the variance beside a second
# measure that has not risen. Without one it must explain four fifths, because longer responses may be better.
_MOST_CORRELATION, _MOST_ALONE = 0.7, 0.9
_FEWEST_CORRELATIONS = 5  # steps whose responses to a prompt had different rewards
_MINOR = 0.5  # part of another reward's weighted standard deviation below which a reward is a minor one
_ONE_FORM, _SEVERAL_FORMS = 0.9, 0.5  # fractions of the prompts at the end and at the start


def second_reward(history: HealthHistory) -> Failure | None:
    """Return a failure if a reward has fallen while another one has risen, in training or since the first validation.

    One with a weight only counts if it is not a minor one, such as a small penalty, beside the one that has risen.
    """
    for metric in ("reward/{}", "val/{}_sampled"):
        shifts = {name: history.shift(metric.format(name)) for name in (*history.weights, "mean", "score")}
        better = {name: shift.errors * _sign(history.weights.get(name, 1.0)) for name, shift in shifts.items()}
        rewards = [name for name, weight in history.weights.items() if weight and better[name] >= CLEAR]
        risen = max(rewards, key=better.__getitem__, default=None)
        risen = risen or next((name for name in ("mean", "score") if better[name] >= CLEAR), None)
        if risen is None:
            continue
        fallen = [name for name in history.weights if better[name] <= -CLEAR and not _is_minor(history, name, risen)]
        if fallen:
            name = min(fallen, key=better.__getitem__)
            return _fallen(metric.format(name), shifts[name], metric.format(risen), shifts[risen])
    return None


def _fallen(metric: str, fall: Shift, risen: str, rise: Shift) -> Failure:
    return (
        metric,
        fall.now,
        fall.before + math.copysign(CLEAR, fall.errors) * fall.error,
        f"{metric} went {fall} ({abs(fall.errors):.3g} standard errors, above {CLEAR:g}) while {risen} went {rise}: "
        "the policy may exploit the reward that rises",
        "Read these responses. If they are worse, mend the reward that rises, or give the other one more weight",
    )


def rewarded_form(history: HealthHistory) -> Failure | None:
    """Return a failure if length, markup or repetition decides the reward, and moves with it."""
    if not _rises_alone(history):
        return None
    bound = _MOST_CORRELATION if _second_measures(history) else _MOST_ALONE
    for name in MEASURES:
        metric = f"form/{name}_correlation"
        correlations = known(history.recent, metric)
        if len(correlations) < _FEWEST_CORRELATIONS:
            continue
        correlation = fmean(correlations)
        mean = "rollout/response_tokens_mean" if name == "length" else f"form/{name}_mean"
        shift = history.shift(mean)
        if abs(correlation) >= bound and shift.errors * _sign(correlation) >= CLEAR:
            return (
                metric,
                correlation,
                math.copysign(bound, correlation),
                f"the {name} of a response explains {correlation**2:.0%} of the reward's variance among the responses "
                f"to a prompt (above {bound**2:.0%}), and {mean} went {shift} while the reward rose",
                "Read these responses. If the form is not the task, change the reward so that it does not depend on "
                "it. A second reward with weight 0 that measures the task shows whether responses become better",
            )
    return None


def one_form(history: HealthHistory) -> Failure | None:
    """Return a failure if responses have taken one form while the reward rose.

    All prompts with the same text are a failure in any case; a common form of the responses to a prompt only if the run
    has a second measure, because a policy that is sure of the right answer repeats it too.
    """
    if not _rises_alone(history):
        return None
    metrics = {"form/common_text_fraction": "responses of a step have the same text, whatever the prompt"}
    if _second_measures(history):
        metrics |= {f"form/same_{form}_fraction": f"prompts have responses of one {form} only" for form in FORMS}
    for metric, description in metrics.items():
        before, now = history.at_start(metric), history.mean(metric, 5)
        if now > _ONE_FORM and before < _SEVERAL_FORMS:
            return (
                metric,
                now,
                _ONE_FORM,
                f"{now:.0%} of the {description} (5 steps, above {_ONE_FORM:.0%}; {before:.0%} at the start), and the "
                "reward rose: the policy may have found one response that the reward likes",
                "Read these responses. If they do not do the task, mend the reward, and start again from a checkpoint "
                "before they became equal",
            )
    return None


def _rises_alone(history: HealthHistory) -> bool:
    """Return whether the reward has risen very clearly, but no second measure, and at most one of its parts."""
    parts = {name: weight for name, weight in history.weights.items() if weight}
    followed = [history.shift(f"reward/{name}").errors * _sign(weight) >= _FOLLOWED for name, weight in parts.items()]
    measured = any(shift.errors >= _FOLLOWED for shift in _second_measures(history))
    return history.shift("reward/mean").errors >= _VERY_CLEAR and sum(followed) < 2 and not measured


def _second_measures(history: HealthHistory) -> list[Shift]:
    """Return the known changes of rewards with weight 0 and of correct responses in validations."""
    metrics = [f"reward/{name}" for name, weight in history.weights.items() if not weight]
    metrics += ["val/fraction_correct_sampled", "val/fraction_correct_greedy"]
    return [shift for shift in map(history.shift, metrics) if not math.isnan(shift.errors)]


def _is_minor(history: HealthHistory, name: str, other: str) -> bool:
    """Return whether a reward with a weight counts much less than another one, by their spread at the start."""

    def spread(reward: str) -> float:
        metric = "reward/std" if reward == "mean" else f"reward/{reward}_std"
        return abs(history.weights.get(reward, 1.0)) * history.at_start(metric)

    return bool(history.weights[name]) and spread(name) < _MINOR * spread(other)


def _sign(value: float) -> float:
    return math.copysign(1.0, value)
