"""Each health check: metrics for which it fails, and metrics just within its limit."""

import math

import pytest

from lightning_rlhf.extras.health.monitor import CHECKS, HealthMonitor


def steps(count, **metrics):
    """Return rows of metrics: numbers are constant, functions receive the step, counted from 0."""
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [{name: value(i) if callable(value) else value for name, value in names.items()} for i in range(count)]


WEIGHTS = {"a": 1.0, "b": 0.0}


def findings(rows, rewards=(), weights=WEIGHTS):
    monitor = HealthMonitor(rewards, bounds={"val/pair_accuracy": 0.95, "val/policy_order": 0.98}, weights=weights)
    for i, row in enumerate(rows):
        monitor.add(int(row.get("step", i + 1)), {k: v for k, v in row.items() if k != "step"})
    return monitor.findings


def test_reward_that_never_applies_is_reported_as_constant():
    rows = steps(3, **{"reward_a/not_applicable": 1.0, "reward__mean": 0.0})
    (finding,) = findings(rows, rewards=["a"])
    assert (finding.check, finding.step) == ("constant reward", 3)
    assert finding.message == "reward a was None for all responses of 3 steps: the policy learns nothing from it"
    rows[1]["reward_a/not_applicable"] = 0.9
    assert not findings(rows, rewards=["a"])


def around(start, end, size=0.1):
    """Return a metric that alternates around one value in the first ten steps, and around another one later.

    Successive values differ by ``2 size``, so that their variance is ``2 size^2``, and the standard error of the change
    ``sqrt(0.4) size``: 0.0632 for 0.1.
    """
    return lambda i: (start if i < 10 else end) + size * (-1) ** i


LEARNING = {"reward__mean": lambda i: 0.1 + 0.05 * i, "reward__std": 0.4}
POLICY_CHECK = {"val/policy_score_mean": 0.0}  # at the end of training
RISING = {"reward__mean": around(0.3, 0.9)}
FLAT = {"reward__mean": 0.3, "reward__std": 0.4}


def validations(values, reward):
    """Return thirty steps, with a validation after every fifth."""
    rows = []
    for i in range(30):
        rows.append({"step": i + 1, "reward/mean": reward(i)})
        if i % 5 == 4:
            rows.append({"step": i + 1, "val/fraction_correct_sampled": values[i // 5]})
    return rows


def with_intervals(values):
    """Return validations after every fifth step, with intervals of plus and minus 0.1, and no training steps."""
    bounds = {"val/fraction_correct_sampled_low": -0.1, "val/fraction_correct_sampled_high": 0.1}
    rows = [row for row in validations(values, lambda i: 0.5) if "reward/mean" not in row]
    return [
        {**row, **{name: row["val/fraction_correct_sampled"] + shift for name, shift in bounds.items()}} for row in rows
    ]


# name: rows that fail, the step, value and bound of the failure, rows that do not fail
CASES = {
    "constant reward": (
        steps(5, reward__a=0.1, reward__a_std=0.0), 3, 0.0, 0.0, steps(5, reward__a=0.1, reward__a_std=0.01),
    ),
    "lost reward": (
        steps(8, reward__mean=lambda i: 0.1 * (i < 2), reward__std=lambda i: 0.3 * (i < 2)), 6, 0.0, 0.1,
        steps(8, reward__mean=lambda i: 0.1 + 0.9 * (i > 2), reward__std=lambda i: 0.3 * (i < 2)),
    ),
    "equal groups": (
        steps(6, group__equal_reward_fraction=0.95, **FLAT), 5, 0.95, 0.9,
        steps(6, group__equal_reward_fraction=0.85, **FLAT),
    ),
    "KL to the reference": (
        steps(3, kl__ref=lambda i: 2.0 * i, rollout__response_tokens_mean=30.0), 3, 4 / 30, 0.1,
        steps(3, kl__ref=3.0, rollout__response_tokens_mean=30.0),
    ),
    "entropy collapse": (
        steps(25, policy__entropy=lambda i: 2.0 if i < 3 else 0.1, **FLAT), 20, 0.1, 0.2,
        steps(25, policy__entropy=lambda i: 2.0 if i < 3 else 0.1, **LEARNING),
    ),
    "length drift": (
        steps(9, rollout__response_tokens_mean=lambda i: 10.0 if i < 3 else 31.0), 8, 31.0, 30.0,
        steps(9, rollout__response_tokens_mean=lambda i: 10.0 if i < 3 else 29.0),
    ),
    "truncation": (
        steps(4, rollout__truncated_fraction=0.21), 3, 0.21, 0.2, steps(4, rollout__truncated_fraction=0.19),
    ),
    "clipping": (steps(4, policy__clip_fraction=0.31), 3, 0.31, 0.3, steps(4, policy__clip_fraction=0.29)),
    "engine and actor": (
        steps(4, rollout__logprob_diff_mean=0.12), 3, 0.12, 0.1, steps(4, rollout__logprob_diff_mean=0.09),
    ),
    "critic": (
        steps(22, value__explained_variance=-0.2), 20, -0.2, -0.1,
        steps(22, value__explained_variance=lambda i: -1.0 if i < 15 else 0.3),
    ),
    "over-optimisation": (
        validations([0.2, 0.5, 0.6, 0.55, 0.5, 0.5], lambda i: 0.01 * i), 25, 0.5, 0.57,
        validations([0.2, 0.5, 0.6, 0.55, 0.5, 0.5], lambda i: 0.5 - 0.01 * i),
    ),
    "worse validation": (
        with_intervals([0.2, 0.5, 0.6, 0.5, 0.39, 0.4]), 25, 0.39, 0.5, with_intervals([0.2, 0.5, 0.6, 0.5, 0.41, 0.4]),
    ),
    "second reward": (
        steps(20, reward__a=around(0.3, 0.8), reward__b=around(0.6, 0.28)), 20, 0.28, 0.6 - 5 * 0.0632456,
        steps(20, reward__a=around(0.3, 0.8), reward__b=around(0.6, 0.29)),
    ),
    "rewarded form": (
        steps(20, **RISING, form__repetition_mean=around(0.1, 0.5), form__repetition_correlation=0.91),
        20, 0.91, 0.9,
        steps(20, **RISING, form__repetition_mean=around(0.1, 0.5), form__repetition_correlation=0.89),
    ),
    "one form": (
        steps(20, **RISING, form__common_text_fraction=lambda i: 0.1 if i < 3 else 0.95),
        20, 0.95, 0.9,
        steps(20, **RISING, form__common_text_fraction=lambda i: 0.1 if i < 3 else 0.85),
    ),
    "reward model": (
        [{"val/pair_accuracy": 0.9}, {"val/pair_accuracy": 0.96, "val/policy_order": 0.97, **POLICY_CHECK}],
        2, 0.97, 0.98,
        [{"val/pair_accuracy": 0.9}, {"val/pair_accuracy": 0.96, "val/policy_order": 0.99, **POLICY_CHECK}],
    ),
    "rising loss": (
        steps(12, train__loss=lambda i: 1.0 if i < 3 else 2.0), 10, 1.7, 1.5,
        steps(12, train__loss=lambda i: 1.0 if i < 3 else 1.4),
    ),
    "gradient spike": (
        steps(25, grad_norm__actor=lambda i: 11.0 if i in (10, 15, 22) else 1.0), 23, 11.0, 10.0,
        steps(25, grad_norm__actor=lambda i: 11.0 if i in (10, 22) else 1.0),
    ),
    "waiting": (
        steps(6, time__step_s=10.0, time__sync_s=1.0, time__reward_s=2.5, time__check_s=0.0), 5, 0.35, 0.3,
        steps(6, time__step_s=10.0, time__sync_s=0.5, time__reward_s=2.0, time__check_s=0.0),
    ),
}  # fmt: skip


def test_improving_policy_may_move_further_from_the_reference():
    def result(per_token, start, rewards, *names):
        rows = steps(12, kl__ref=lambda i: 30 * per_token * (i >= start), rollout__response_tokens_mean=30.0, **rewards)
        return [(finding.check, finding.step, finding.bound) for finding in findings(rows, rewards=names)]

    assert result(0.2, 9, LEARNING) == []
    assert result(0.2, 9, FLAT) == [("KL to the reference", 10, 0.1)]
    assert result(0.2, 1, LEARNING) == [("KL to the reference", 2, 0.1)]
    assert result(0.4, 9, LEARNING) == [("KL to the reference", 10, 0.3)]
    assert result(0.4, 9, LEARNING, "right") == []  # a function judges
    rising = {"reward__mean": lambda i: 0.01 if i == 0 else 0.2, "reward__std": 0.1}
    assert result(0.2, 1, rising) == []


def test_metric_beyond_its_limit_from_the_start_is_not_a_consequence():
    rows = steps(4, kl__ref=9.0, rollout__response_tokens_mean=30.0, rollout__truncated_fraction=0.7, **FLAT)
    result = {finding.check: finding.remedy for finding in findings(rows)}
    assert "KL to the reference" in result
    assert result["truncation"].startswith("Raise max_response_tokens")


def test_shorter_responses_with_a_higher_reward_do_not_count_as_drift():
    lengths = {"rollout__response_tokens_mean": lambda i: 10.0 if i < 3 else 2.0}
    rising = {"reward__mean": lambda i: 0.1 if i < 3 else 0.9, "reward__std": 0.2}
    assert not findings(steps(9, **lengths, **rising))
    assert [finding.check for finding in findings(steps(9, **lengths, **FLAT))] == ["length drift"]


def test_critic_of_nearly_constant_returns_does_not_fail():
    rows = steps(22, value__explained_variance=-0.5, reward__std=lambda i: 1.0 if i < 10 else 0.06)
    assert not findings(rows)
    rows = steps(22, value__explained_variance=-0.5, reward__std=lambda i: 1.0 if i < 10 else 0.6)
    assert [finding.check for finding in findings(rows)] == ["critic"]


def test_failure_that_another_one_explains_is_marked_as_its_consequence():
    rows = steps(
        9,
        kl__ref=lambda i: 9.0 * i,
        rollout__response_tokens_mean=30.0,
        rollout__truncated_fraction=lambda i: float(i > 2),
        reward__mean=lambda i: 0.3 * (i < 2),
        reward__std=lambda i: 0.3 * (i < 2),
        group__equal_reward_fraction=1.0,
    )
    result = {finding.check: finding for finding in findings(rows)}
    assert list(result) == ["KL to the reference", "truncation", "equal groups", "lost reward"]
    for name in ("truncation", "equal groups"):
        expected = 'This is probably a consequence of "KL to the reference" (step 2): mend that first'
        assert result[name].remedy == expected
    alone = findings(steps(9, rollout__truncated_fraction=1.0))
    assert alone[0].remedy.startswith("Raise max_response_tokens")


def test_equal_groups_with_a_constant_reward_are_its_consequence():
    rows = steps(6, reward__a=0.1, reward__a_std=0.0, group__equal_reward_fraction=1.0, **FLAT)
    constant, equal = findings(rows, ["a"])
    assert (constant.check, equal.check) == ("constant reward", "equal groups")
    assert equal.remedy == 'This is probably a consequence of "constant reward" (step 3): mend that first'


# A run without these parts is checked by the others.
OPTIONAL = {"reward/std", "val/pair_accuracy", "time/sync_s", "time/check_s"}


def test_every_check_has_a_case():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_check_fails_once_at_the_first_step_beyond_its_limit(name):
    fails, step, value, bound, passes = CASES[name]
    (finding,) = findings(fails, ["a"])
    assert (finding.check, finding.step) == (name, step)
    assert (finding.value, finding.bound) == pytest.approx((value, bound))
    assert finding.remedy
    assert not findings(passes, ["a"])


@pytest.mark.parametrize("name", CASES)
def test_missing_or_nan_metrics_fail_no_check(name):
    fails = CASES[name][0]
    for column in {column for row in fails for column in row if column != "step"} - OPTIONAL:
        without = [{k: v for k, v in row.items() if k != column} for row in fails]
        assert not findings([row for row in without if row.keys() - {"step"}], ["a"]), column
        assert not findings([{**row, column: math.nan} for row in fails if column in row], ["a"]), column


def test_groups_that_are_equal_because_all_responses_are_right_do_not_fail():
    rows = steps(
        9, group__equal_reward_fraction=lambda i: 0.1 * i + 0.3, reward__std=0.4, reward__mean=lambda i: 0.1 * i
    )
    assert not findings(rows)


@pytest.mark.parametrize(("mean", "fails"), [(0.74, True), (0.95, False)])
def test_equal_groups_below_the_largest_reward_fail_after_a_rising_reward(mean, fails):
    rows = steps(
        12,
        group__equal_reward_fraction=lambda i: 0.2 if i < 5 else 0.95,
        reward__std=0.4,
        reward__mean=lambda i: 0.1 if i < 5 else mean,
        reward__max=1.0,
    )
    result = {finding.check: finding for finding in findings(rows)}
    assert ("equal groups" in result) is fails
    if fails:
        assert "the mean reward is 0.74 of at most 1: the policy repeats its answers" in result["equal groups"].message


def test_equal_groups_after_a_damaged_policy_do_not_refer_to_the_prompts():
    lost = {"reward__mean": lambda i: 0.1 * (i < 1), "reward__std": lambda i: 0.3 * (i < 1)}
    rows = steps(9, group__equal_reward_fraction=lambda i: 0.75 + 0.25 * (i > 0), **lost)
    assert [finding.check for finding in findings(rows)] == ["lost reward"]


@pytest.mark.parametrize(("responses", "lost"), [(16, False), (64, True)])
def test_few_lucky_responses_do_not_count_as_lost_skill(responses, lost):
    share = 1 / 16
    reward = {
        "reward__mean": lambda i: share * (i < 1),
        "reward__std": lambda i: (share * (1 - share)) ** 0.5 * (i < 1),
    }
    tokens = {"rollout__response_tokens": responses * 20.0, "rollout__response_tokens_mean": 20.0}
    assert [finding.check for finding in findings(steps(9, **reward, **tokens))] == ["lost reward"] * lost


def test_truncated_turns_have_a_separate_limit():
    (result,) = findings(steps(4, rollout__truncated_fraction=0.9, env__turns=2.0))
    assert result.remedy.startswith("Raise max_turn_tokens of the environment, or max_response_tokens. If")


def test_perfect_policy_does_not_count_as_collapsed():
    rows = steps(30, policy__entropy=lambda i: 2.0 if i < 3 else 0.01, reward__mean=1.0, reward__std=0.0)
    assert not findings(rows)


def test_late_constant_reward_is_not_attributed_to_its_function():
    rows = steps(9, reward__a=lambda i: 0.5 if i < 2 else 1.0, reward__a_std=lambda i: 0.3 if i < 2 else 0.0)
    assert not findings(rows, ["a"])
