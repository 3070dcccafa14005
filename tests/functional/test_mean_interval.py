"""Confidence intervals of a mean over prompts."""

import random

import pytest

from lightning_rlhf.functional.samples import draw_sizes, mean_difference, mean_interval, wilson_interval
from tests.helpers import assert_close


def test_one_response_per_prompt_gives_the_wilson_interval():
    result = mean_interval([[1.0]] * 7 + [[0.0]] * 3)
    assert result["interval"] == "wilson"
    assert_close([result["low"], result["high"]], [0.39677, 0.89221], rtol=1e-4)
    assert_close(mean_interval([[1.0]] * 5)["low"], 5 / (5 + 1.959964**2))


def test_samples_of_one_prompt_are_not_independent_trials():
    alike = mean_interval([[1.0] * 50] * 5 + [[0.0] * 50] * 5)
    single = mean_interval([[1.0]] * 5 + [[0.0]] * 5)
    assert_close([alike["low"], alike["high"]], [single["low"], single["high"]])
    spread = mean_interval([[1.0] * 25 + [0.0] * 25] * 10)  # all prompts alike: every sample adds information
    assert spread["high"] - spread["low"] < (single["high"] - single["low"]) / 5


def test_other_values_get_the_normal_interval():
    result = mean_interval([[1.0], [2.0], [4.0]])  # s^2 = 7/3, standard error sqrt(7/9)
    assert result["interval"] == "normal"
    assert_close([result["low"], result["high"]], [7 / 3 - 1.959964 * 7**0.5 / 3, 7 / 3 + 1.959964 * 7**0.5 / 3])
    assert mean_interval([[5.0]]) == {"mean": 5.0, "low": None, "high": None, "interval": "none"}


@pytest.mark.parametrize("kinds", [(0.5, 0.5), (0.1, 0.9), (0.0, 1.0), (0.02, 0.3)])
def test_intervals_contain_the_true_value_at_the_nominal_rate(kinds):
    draw, held, tries = random.Random(0), 0, 600
    for _ in range(tries):
        prompts = [draw.choice(kinds) for _ in range(40)]
        result = mean_interval([[float(draw.random() < p) for _ in range(8)] for p in prompts])
        held += result["low"] <= sum(kinds) / 2 <= result["high"]
    assert 0.92 <= held / tries <= 0.985


def test_values_between_0_and_1_have_the_number_of_trials_that_explains_their_variance():
    # p = 1/2, s^2 = (0.1^2 + 0.1^2) / 2 = 0.01 with m - 1 = 2, n = 0.25 / (0.01 / 3) = 75 trials
    result = mean_interval([[0.4], [0.5], [0.6]])
    expected = wilson_interval(37.5, 75)
    assert result["interval"] == "wilson"
    assert_close([result["low"], result["high"]], list(expected))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("parameters", [(2, 5), (0.5, 0.5), (1, 20)])
def test_intervals_of_graded_rewards_contain_the_mean_at_the_nominal_rate(parameters, samples):
    draw, contained, tries = random.Random(0), 0, 600
    a, b = parameters
    for _ in range(tries):
        result = mean_interval([[draw.betavariate(a, b) for _ in range(samples)] for _ in range(40)])
        contained += result["low"] <= a / (a + b) <= result["high"]
    assert 0.92 <= contained / tries <= 0.985


def test_intervals_at_0_and_1_contain_them():
    for value in (0.0, 1.0):
        result = mean_interval([[value] * 3] * 4)
        assert result["low"] <= value <= result["high"]
        assert result["high"] - result["low"] > 0.3
    assert mean_interval([[0.0]])["low"] == 0.0
    assert mean_interval([[1.0]])["high"] == 1.0


# -- differences of two lists ------------------------------------------------------------------------------------------


def test_difference_by_hand():
    result = mean_difference([[0.0], [0.0], [1.0], [1.0]], [[1.0], [1.0], [1.0], [0.0]])
    assert result["mean"] == 0.25
    deviation = (((0.75**2) * 2 + 0.25**2 + 1.25**2) / 3) ** 0.5
    assert result["low"] == pytest.approx(0.25 - 1.959964 * deviation / 2)
    assert result["high"] == 1.0  # 0.25 + 0.938, cut at the largest difference


def test_equal_differences_have_an_interval():
    """By hand, after Agresti and Min: 10 changes of 1, half a 1 and half a -1; mean 10 / 12, mean square 11 / 12."""
    reach = 1.959964 * ((11 / 12 - (10 / 12) ** 2) / 12) ** 0.5
    assert mean_difference([[0.0]] * 10, [[1.0]] * 10) == {
        "mean": 1.0,
        "low": pytest.approx(10 / 12 - reach),
        "high": 1.0,
    }
    assert mean_difference([[1.0]] * 10, [[0.0]] * 10) == {
        "mean": -1.0,
        "low": -1.0,
        "high": pytest.approx(reach - 10 / 12),
    }
    same = mean_difference([[0.0]] * 10, [[0.0]] * 10)
    assert same["mean"] == 0.0
    assert same["high"] == pytest.approx(1.959964 * (1 / 12 / 12) ** 0.5) == -same["low"]
    more = mean_difference([[0.0]] * 1000, [[1.0]] * 1000)
    assert 0.99 < more["low"] < 1.0


def test_differences_of_other_values_are_not_cut():
    result = mean_difference([[0.0], [0.0]], [[3.0], [5.0]])
    assert (result["mean"], result["high"]) == (4.0, pytest.approx(4.0 + 1.959964))
    assert mean_difference([[2.0], [2.0]], [[3.0], [3.0]]) == {"mean": 1.0, "low": 1.0, "high": 1.0}


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes_of_draws_double_and_end_with_all_samples(samples, sizes):
    assert draw_sizes(samples) == sizes


def test_equal_differences_of_rewards_above_1_have_no_width():
    # The wider interval of equal differences is for values in [0, 1] only.
    assert mean_difference([[1.5], [1.2]], [[1.6], [1.3]])["low"] == pytest.approx(0.1)
    assert mean_difference([[0.5], [0.2]], [[0.6], [0.3]])["low"] < -0.3
