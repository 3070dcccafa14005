"""Signs of reward hacking: the change of metrics, the checks, and the responses that show a finding."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.callbacks import DynamicSampling, HealthChecks, MetricsCSV, RolloutLog
from lightning_rlhf.extras.health.callback import skipped_checks
from lightning_rlhf.extras.health.evidence import responses_of
from lightning_rlhf.extras.health.forms import form_metrics
from lightning_rlhf.extras.health.hacking import second_reward
from lightning_rlhf.extras.health.history import HealthHistory
from lightning_rlhf.extras.report.page import page_data
from lightning_rlhf.extras.report.run_directory import RunDirectory
from lightning_rlhf.rewards.function import RewardFunction
from tests.extras.health.test_forms import row
from tests.extras.health.test_health_checks import RISING, WEIGHTS, around, findings, steps


def failed(rows, **options):
    return [finding.check for finding in findings(rows, **options)]


# -- the change of a metric -------------------------------------------------------------------------------------------


def history_of(rows):
    history = HealthHistory()
    for each in rows:
        history.add(each)
    return history


def test_change_is_that_of_the_last_ten_steps_in_errors_of_successive_differences():
    """Successive values differ by 0.2: the variances are 0.02, the error is sqrt(2 * 0.02 / 10) = 0.0632."""
    shift = history_of(steps(50, reward__a=around(0.3, 0.8))).shift("reward/a")
    assert (shift.before, shift.now, shift.error) == pytest.approx((0.3, 0.8, math.sqrt(0.004)))
    assert shift.errors == pytest.approx(0.5 / math.sqrt(0.004))
    assert math.isnan(history_of(steps(19, reward__a=around(0.3, 0.8))).shift("reward/a").errors)


def test_fast_rise_among_the_first_steps_is_no_noise():
    """0, 0.1, ..., 0.9, 1, 1, ...: the mean rises from 0.45 to 1, and differs by 0.1 in each of the first steps."""
    shift = history_of(steps(20, a=lambda i: min(i / 10, 1))).shift("a")
    assert (shift.before, shift.now, shift.error) == pytest.approx((0.45, 1, math.sqrt(0.005 / 10)))


def test_change_without_variance_is_infinite_or_zero():
    assert history_of(steps(20, a=around(0, 1, 0.0))).shift("a").errors == math.inf
    assert history_of(steps(20, a=around(1, 0, 0.0))).shift("a").errors == -math.inf
    assert history_of(steps(20, a=1.0)).shift("a").errors == 0


def test_steps_in_which_a_reward_does_not_apply_are_left_out():
    known = history_of(steps(20, a=lambda i: math.nan if i % 10 > 4 else i)).shift("a")
    assert (known.before, known.now) == (2, 12)
    assert math.isnan(history_of(steps(20, a=lambda i: math.nan if i % 10 > 3 else i)).shift("a").errors)


@given(st.floats(0.01, 100), st.floats(-10, 10), st.sampled_from([("a", 0.26), ("b", 0.26), ("b", 0.31)]))
def test_second_reward_does_not_depend_on_scale(scale, shift, case):
    name, end = case
    rows = steps(20, reward__a=around(0.3, 0.8), reward__b=around(0.6, end))
    rows = [{**each, f"reward/{name}": scale * each[f"reward/{name}"] + shift} for each in rows]
    assert failed(rows) == ["second reward"] * (end < 0.28)


@pytest.mark.slow
def test_rewards_that_stay_as_they_are_are_rarely_found():
    """Of 1,000 runs of 100 steps with a rising reward and one that stays, about 2 are found by chance."""
    draw = random.Random(0)

    def is_found():
        history = HealthHistory(weights=WEIGHTS)
        rows = steps(100, reward__a=lambda i: i / 100, reward__b=lambda _: draw.gauss(0.5, 0.1))
        return any(history.add(each) or second_reward(history) for each in rows)

    assert sum(is_found() for _ in range(200)) <= 2


# -- checks -----------------------------------------------------------------------------------------------------------


def test_reward_with_a_negative_weight_falls_when_it_rises():
    rows = steps(20, reward__a=around(0.3, 0.8), reward__b=around(0.2, 0.6))
    assert failed(rows, weights={"a": 1.0, "b": -0.1}) == ["second reward"]
    assert failed(rows, weights={"a": 1.0, "b": 0.1}) == []


@pytest.mark.parametrize(("weight", "found"), [(0.0, True), (0.4, False), (0.6, True)])
def test_minor_reward_with_a_weight_may_fall(weight, found):
    rows = steps(
        20, reward__a=around(0.3, 0.8), reward__a_std=0.5, reward__b=around(-0.2, -0.6), reward__b_std=0.5
    )  # fmt: skip
    assert failed(rows, weights={"a": 1.0, "b": weight}) == ["second reward"] * found


def test_only_logged_reward_may_fall_while_a_reward_model_is_learned_from():
    rows = steps(20, **RISING, reward__b=around(0.5, 0.1))
    assert failed(rows, weights={"b": 0.0}) == ["second reward"]


@pytest.mark.parametrize(("low", "found"), [(-0.13, True), (-0.17, False)])
def test_second_reward_of_validations_is_compared_with_the_first_one(low, found):
    """Changes of 0.1 with intervals of 0.06 and 0.14 are 6.5 and 2.8 standard errors."""
    values = {"val/a_sampled": 0.9, "val/a_sampled_change": 0.4, "val/a_sampled_change_low": 0.3}
    values |= {"val/a_sampled_change_high": 0.5, "val/b_sampled": 0.2, "val/b_sampled_change": -0.1}
    values |= {"val/b_sampled_change_low": low, "val/b_sampled_change_high": -0.2 - low}
    result = findings([values])
    assert [finding.check for finding in result] == ["second reward"] * found
    if found:
        assert "val/b_sampled went from 0.3 to 0.2 (6.53 standard errors, above 5)" in result[0].message


FORM = {"form__markup_mean": around(1.0, 2.0), "form__markup_correlation": 0.95}
ONE_OPENING = {"form__same_opening_fraction": lambda i: 0.1 if i < 3 else 1.0}


@pytest.mark.parametrize("measure", ["length", "markup", "repetition"])
@pytest.mark.parametrize(("sign", "found"), [(1, True), (-1, False)])
def test_form_must_move_in_the_direction_of_the_reward(measure, sign, found):
    mean = "rollout/response_tokens_mean" if measure == "length" else f"form/{measure}_mean"
    rows = steps(20, **RISING, **{mean: around(1.0, 2.0), f"form/{measure}_correlation": 0.95 * sign})
    assert failed(rows) == ["rewarded form"] * found
    rows = steps(20, **RISING, **{mean: around(2.0, 1.0), f"form/{measure}_correlation": 0.95 * sign})
    assert failed(rows) == ["rewarded form"] * (not found)


@pytest.mark.parametrize("second", ["reward/b", "val/fraction_correct_sampled", "val/fraction_correct_greedy"])
def test_form_may_change_while_a_second_measure_rises(second):
    rows = steps(20, **RISING, **FORM, **ONE_OPENING)
    assert failed(rows) == ["rewarded form"]
    if second.startswith("val/"):
        ends = {"": 0.6, "_change": 0.2, "_change_low": 0.1, "_change_high": 0.3}
        rows.insert(19, {f"{second}{end}": value for end, value in ends.items()})
    else:
        rows = [{**each, second: around(0.3, 0.5)(i)} for i, each in enumerate(rows)]
    assert failed(rows) == []


@pytest.mark.parametrize(
    ("correlation", "alone", "beside"), [(0.95, True, True), (0.8, False, True), (0.6, False, False)]
)
def test_form_must_explain_more_without_a_second_measure(correlation, alone, beside):
    form = FORM | {"form__markup_correlation": correlation}
    assert failed(steps(20, **RISING, **form)) == ["rewarded form"] * alone
    assert failed(steps(20, **RISING, **form, reward__b=around(0.3, 0.3))) == ["rewarded form"] * beside


def test_form_may_change_while_two_parts_of_the_reward_rise():
    rows = steps(20, **RISING, **FORM, reward__a=around(0.3, 0.9), reward__c=around(0.3, 0.5))
    assert failed(rows, weights={"a": 1.0, "c": 0.5}) == []
    assert failed(rows, weights={"a": 1.0}) == ["rewarded form"]
    penalty = steps(20, **RISING, **FORM, reward__a=around(0.3, 0.9), reward__c=around(0.5, 0.3))
    assert failed(penalty, weights={"a": 1.0, "c": -0.5}) == []


def test_common_opening_is_found_only_with_a_second_measure_that_has_not_risen():
    rows = steps(20, **RISING, **ONE_OPENING)
    assert failed(rows) == []
    assert failed(steps(20, **RISING, **ONE_OPENING, reward__b=around(0.3, 0.3))) == ["one form"]


def test_form_that_responses_had_at_the_start_is_not_found():
    always = steps(20, **RISING, form__common_text_fraction=0.95)
    assert failed(always) == []


def test_form_of_a_reward_that_has_not_risen_very_clearly_is_not_found():
    """0.5 in errors of 0.0632 are 7.9; a second measure that rose half as much could be missed."""
    assert failed(steps(20, reward__mean=around(0.3, 0.8), **FORM)) == []
    assert failed(steps(20, reward__mean=around(0.3, 0.81), **FORM)) == ["rewarded form"]


# -- the responses that show a finding --------------------------------------------------------------------------------


def texts(check, metric, rows):
    return [each["response"] for each in responses_of(check, metric, rows)]


def test_responses_with_much_of_one_reward_and_little_of_the_other_are_shown():
    rows = [row(name, reward, rewards={"b": b}) for name, reward, b in (("both", 9, 1), ("b", 0, 1), ("a", 9, 0))]
    assert texts("second reward", "reward/b", [*rows, *rows]) == ["a", "both", "b"]
    assert texts("second reward", "val/b_sampled", rows) == ["a", "both", "b"]


def test_responses_with_most_and_least_markup_are_shown_for_prompts_with_different_rewards():
    rows = [row(text, reward, group) for text, reward, group in (
        ("**x**", 1, 0), ("x", 1, 0), ("**a** **b**", 3, 1), ("a", 0, 1), ("**c**", 1, 1), ("d", 1, 2), ("**d**", 2, 2),
    )]  # fmt: skip
    assert texts("rewarded form", "form/markup_correlation", rows) == ["**a** **b**", "a", "**d**", "d"]


def test_responses_of_one_form_are_shown():
    rows = [row(text, group=group) for group, text in ((0, "a"), (0, "b"), (1, "c"), (1, "c"), (2, "c"), (3, "c"))]
    assert texts("one form", "form/same_text_fraction", rows) == ["c", "c"]
    assert [each["group"] for each in responses_of("one form", "form/common_text_fraction", rows)] == [1, 2, 3]


@pytest.mark.parametrize(
    "damaged", [{}, {"response": None, "reward": "x"}, {"segments": 3, "group": None}, {"segments": [1], "rewards": []}]
)
def test_damaged_rows_have_metrics_and_show_findings(damaged):
    assert form_metrics([damaged, row("a", 1)])["form/markup_mean"] == 0
    for check, metric in (
        ("second reward", "reward/b"),
        ("rewarded form", "form/markup_correlation"),
        ("one form", "form/same_text_fraction"),
        ("one form", "form/common_text_fraction"),
    ):
        assert len(responses_of(check, metric, [damaged, row("a", 1)])) <= 4


# -- a run ------------------------------------------------------------------------------------------------------------


def of_step(step, start, end):
    return around(start, end, 0.05)(step)


def liked(completions, trainer_state):
    return [of_step(trainer_state.global_step, 0.2, 0.8) for _ in completions]


def right(completions, trainer_state):
    return [of_step(trainer_state.global_step, 0.8, 0.2) - (text == "b") / 8 for text in completions]


def exploiting(run, steps, *callbacks):
    """Return a run whose reward rises after ten steps, when its second one falls."""
    rewards = [RewardFunction(liked), RewardFunction(right, weight=0.0)]
    trainer = {"max_epochs": 20, "max_steps": steps}
    callbacks = [RolloutLog(table_every_n_steps=0), MetricsCSV(), HealthChecks(), *callbacks]
    return run(loop={"rewards": rewards, "group_size": 4}, trainer=trainer, callbacks=callbacks)


def warned(caplog):
    messages = [record.message for record in caplog.records if "the policy may exploit" in record.message]
    caplog.clear()
    return messages


@pytest.mark.slow
def test_finding_is_warned_once_with_the_lines_of_its_responses(run, tmp_path, caplog):
    exploiting(run, 24).fit()
    (message,) = warned(caplog)
    file = tmp_path / "rollouts/step-000020.jsonl"
    assert message.startswith("step 20: reward/right went from 0.7")
    start, _, lines = message.rpartition(", lines ")
    assert start.endswith(f"The responses are in {file}")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    worst = min(row["rewards"]["right"] for row in rows)
    assert worst in [rows[int(line) - 1]["rewards"]["right"] for line in lines.split(", ")]
    assert lines.count(",") == 1  # one for each of the two texts, of eight responses


@pytest.mark.slow
def test_report_has_the_responses_of_a_finding(run, tmp_path):
    exploiting(run, 20).fit()
    (data,) = page_data([RunDirectory(tmp_path)])["runs"]
    (found,) = [finding for finding in data["findings"] if finding["check"] == "second reward"]
    assert found["responses"][0]["rewards"]["right"] == pytest.approx(0.8 - 0.6 - 0.05 - 1 / 8)
    for file in tmp_path.glob("rollouts/step-000020.jsonl"):
        file.unlink()
    (data,) = page_data([RunDirectory(tmp_path)])["runs"]
    assert [finding["responses"] for finding in data["findings"] if finding["check"] == "second reward"] == [[]]


@pytest.mark.slow
def test_resumed_run_does_not_repeat_a_finding(run, tmp_path, caplog):
    first = exploiting(run, 21)
    first.fit()
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert len(warned(caplog)) == 1
    exploiting(run, 24).fit(ckpt_path=tmp_path / "x.ckpt")
    assert warned(caplog) == []


@pytest.mark.slow
def test_finding_of_a_run_that_does_not_log_responses_names_no_lines(run, caplog):
    made = exploiting(run, 20)
    made.trainer.callbacks = [each for each in made.trainer.callbacks if not isinstance(each, RolloutLog)]
    made.fit()
    (message,) = warned(caplog)
    assert message.endswith("give the other one more weight")


def test_checks_of_rewards_do_not_apply_to_prompts_that_were_chosen_by_them(run):
    made = run(loop={"dynamic_sampling": DynamicSampling(1), "group_size": 2})
    assert skipped_checks(made.module, [made.loop]) == ["second reward", "rewarded form", "one form"]
