import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.objectives.resampling import ScoreResampling
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

METHODS = ("pow", "max_min", "max_random")


def _seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("resampling", "expected"),
    [
        (ScoreResampling(), [0.25, 1, 0.0625, 0]),
        (ScoreResampling(power=1), [0.5, 1, 0.25, 0]),
        (ScoreResampling(power=0), [1, 1, 1, 1]),
        (ScoreResampling("max_min"), [1, 1, 0, 0]),
        (ScoreResampling("max_random"), [0.4, 0.1, 0.1, 0.1]),
    ],
)
def test_weights_worked_by_hand(resampling, expected):
    # Sizes 2, 4, 1, 0; the largest score is 2, the smallest -4.
    assert_close(resampling.weights(float64([2, -4, 1, 0])), expected, rtol=1e-15)


@pytest.mark.parametrize("method", METHODS)
def test_weights_of_float32_scores_are_float64(method):
    assert ScoreResampling(method).weights(torch.tensor([2.0, -4.0])).dtype == torch.float64


def test_rows_with_an_equal_first_or_last_score_all_count():
    scores = float64([3, 1, 3, -1, -1, 0])
    assert_close(ScoreResampling("max_min").weights(scores), [1, 0, 1, 1, 1, 0], rtol=0, atol=0)
    assert_close(ScoreResampling("max_random").weights(scores), [0.4, 0.1, 0.4, 0.1, 0.1, 0.1], rtol=0, atol=0)


@properties
@given(st.sampled_from(METHODS), st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.integers(1, 9), seeds)
def test_weights_are_those_of_a_loop_over_scores(method, power, rows, seed):
    scores = normal(rows, seed=seed).round()
    numbers = scores.tolist()
    rule = {
        "pow": lambda x: (abs(x) / (max(map(abs, numbers)) or 1)) ** power,
        "max_min": lambda x: float(x in (max(numbers), min(numbers))),
        "max_random": lambda x: 0.4 if x == max(numbers) else 0.1,
    }[method]
    assert_close(ScoreResampling(method, power).weights(scores), [rule(x) for x in numbers], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "record", golden("advantages")["draws"], ids=lambda record: f"{record['method']}-{record['power']}"
)
def test_rows_equal_those_that_verl_draws(record):
    resampling = ScoreResampling(record["method"], record["power"])
    rows = resampling(float64(golden("advantages")["inputs"]["scores"]), _seeded(record["seed"]))
    assert rows.tolist() == record["rows"]


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_drawn_in_proportion_to_their_weights(method):
    scores = float64([1, 2, 3, 0]).repeat(5000)
    resampling = ScoreResampling(method)
    share = torch.bincount(resampling(scores, _seeded()) % 4, minlength=4) / len(scores)
    weights = resampling.weights(float64([1, 2, 3, 0]))
    # Six standard deviations of a fraction of 20000 draws are at most 0.021.
    assert (share - weights / weights.sum()).abs().max() < 0.021


def test_rows_of_weight_0_are_drawn_with_probability_1e_8():
    scores = torch.cat([torch.ones(1), torch.zeros(1_000_000)])
    rows = ScoreResampling()(scores, _seeded())
    # 1e6 rows of 1e-8 against one of 1; the fraction's standard deviation is 1e-4.
    assert_close((rows > 0).double().mean(), 0.01 / 1.01, rtol=0, atol=6e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scores", [[0.0, 0.0, 0.0], [5.0], [1e200, -1e200, 1.0], [1e-300, 2e-300], [-2.0, -2.0]])
def test_extreme_scores_give_rows_of_the_batch(method, scores):
    rows = ScoreResampling(method, power=3.0)(float64(scores), _seeded())
    assert rows.dtype == torch.int64
    assert rows.shape == (len(scores),)
    assert set(rows.tolist()) <= set(range(len(scores)))


def test_scores_of_0_are_drawn_uniformly():
    rows = ScoreResampling()(torch.zeros(20000), _seeded())
    assert rows.unique().numel() > 12000  # of 20000 alike, 1 - 1/e are drawn


def test_same_seed_draws_the_same_rows_and_scaling_changes_nothing():
    scores = normal(50, seed=1)
    rows = [ScoreResampling()(factor * scores, _seeded(seed)) for factor, seed in ((1, 5), (1, 5), (4, 5), (1, 6))]
    assert rows[0].equal(rows[1])
    assert rows[0].equal(rows[2])
    assert not rows[0].equal(rows[3])


def test_requested_number_of_rows_is_drawn():
    assert ScoreResampling()(torch.ones(3), _seeded(), 7).shape == (7,)


def test_empty_scores_give_no_rows():
    assert ScoreResampling()(torch.zeros(0), _seeded()).shape == (0,)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_non_finite_scores_are_rejected(score):
    with pytest.raises(ValueError, match=rf"^scores must be finite, got \[1.0, {score}\]$"):
        ScoreResampling()(torch.tensor([1.0, score]), _seeded())


def test_unknown_methods_and_negative_powers_are_rejected():
    with pytest.raises(ValueError, match=r"^method must be one of pow, max_min, max_random, got 'top'$"):
        ScoreResampling("top")
    for power in (-1.0, math.nan):
        with pytest.raises(ValueError, match=rf"^power must be at least 0, got {power}$"):
            ScoreResampling(power=power)


def test_default_is_the_square_of_the_score():
    assert ScoreResampling() == ScoreResampling(method="pow", power=2.0)


def test_hyper_parameters_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScoreResampling().power = 3.0
