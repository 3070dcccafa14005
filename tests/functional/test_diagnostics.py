import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.diagnostics import explained_variance, ordered_share, pass_at_k, wilson_interval
from tests.helpers import assert_close, float64, masks, normal, over_ranks, pad_columns, properties, seeds, with_garbage


def test_explained_variance_of_a_case_worked_by_hand():
    # returns 2, 4, 6: variance 8/3;  residuals 1, 2, 3: variance 2/3, their mean does not count;  1 - 1/4
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values, returns = float64([[1, 2, 7], [3, 7, 7]]), float64([[2, 4, 0], [6, 0, 0]])
    assert_close(explained_variance(values, returns, mask), 0.75)
    assert_close(explained_variance(-values, returns, mask), 1 - (9 * 2 / 3) / (8 / 3))


@properties
@given(masks(), seeds)
def test_explained_variance_is_that_of_the_standard_library(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    inside = returns[mask].tolist()
    residuals = (returns - values)[mask].tolist()
    varies = len(inside) > 1
    expected = 1 - statistics.pvariance(residuals) / statistics.pvariance(inside) if varies else math.nan
    assert_close(explained_variance(values, returns, mask), expected, equal_nan=True)


def test_a_perfect_critic_explains_everything_and_a_constant_one_nothing():
    returns, mask = normal(3, 4, seed=0), torch.ones(3, 4, dtype=torch.bool)
    assert_close(explained_variance(returns, returns, mask), 1)
    assert_close(explained_variance(torch.full_like(returns, 5), returns, mask), 0)
    assert explained_variance(-returns, returns, mask) < 0


@pytest.mark.parametrize("count", [0, 1, 4])
def test_explained_variance_of_returns_that_do_not_vary_is_nan(count):
    mask = torch.arange(4).unsqueeze(0) < count
    assert explained_variance(normal(1, 4, seed=0), torch.full((1, 4), 0.5), mask).isnan()


@properties
@given(masks(), seeds)
def test_padding_and_garbage_do_not_change_explained_variance(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    padded_mask = pad_columns(mask, 2)
    padded = (with_garbage(pad_columns(tensor, 2), padded_mask) for tensor in (values, returns))
    expected = explained_variance(values, returns, mask)
    assert_close(explained_variance(*padded, padded_mask), expected, equal_nan=True)


@properties
@given(masks(min_rows=2), seeds)
def test_ranks_together_explain_what_one_rank_explains(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), 5 + normal(*mask.shape, seed=seed + 1)
    mask[0, 0] = mask[1, 0] = True
    halves = slice(0, 1), slice(1, None)
    results = over_ranks(*(lambda r, h=half: explained_variance(values[h], returns[h], mask[h], r) for half in halves))
    for result in results:
        assert_close(result, explained_variance(values, returns, mask))


def test_pass_at_k_of_cases_worked_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert_close(pass_at_k(4, 1, 2), 0.5)  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
    assert_close(pass_at_k(5, 2, 3), 0.9)  # 1 - C(3, 3) / C(5, 3) = 1 - 1/10
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0


def test_pass_at_k_counts_the_subsets_that_hold_a_correct_sample():
    for n in range(1, 8):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            passed = [any(sample < correct for sample in drawn) for drawn in itertools.combinations(range(n), k)]
            assert_close(pass_at_k(n, correct, k), sum(passed) / len(passed))


def test_pass_at_k_is_the_stable_product_that_the_paper_prints():
    # Chen et al. 2021, figure 3: 1 - prod(1 - k / arange(n - c + 1, n + 1))
    for n, correct, k in [(200, 3, 100), (200, 150, 10), (1000, 1, 1)]:
        assert_close(pass_at_k(n, correct, k), 1 - math.prod(1 - k / i for i in range(n - correct + 1, n + 1)))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 0), (4, 1, 5), (4, -1, 1), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_refuses_numbers_that_do_not_fit_together(n, correct, k):
    with pytest.raises(ValueError, match=rf"^pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={correct}, k={k}$"):
        pass_at_k(n, correct, k)


def test_ordered_share_of_a_case_worked_by_hand():
    # of six pairs, 3>1, 3>2, 2>1 are right, 2=2 is a tie, 0<1 and 0<2 are wrong: 3.5 / 6
    assert_close(ordered_share(torch.tensor([3.0, 2.0, 0.0]), torch.tensor([1.0, 2.0])), 3.5 / 6)


@properties
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_ordered_share_counts_pairs_and_half_the_ties(better, worse):
    points = [1.0 if high > low else 0.5 if high == low else 0.0 for high in better for low in worse]
    share = ordered_share(torch.tensor(better), torch.tensor(worse))
    assert_close(share, statistics.fmean(points))
    assert_close(ordered_share(torch.tensor(worse), torch.tensor(better)), 1 - share)


def test_ordered_share_tells_close_scores_apart():
    # neighbours in bfloat16, and integers beyond float32
    assert ordered_share(torch.tensor([1.0078125]).bfloat16(), torch.tensor([1.0]).bfloat16()) == 1.0
    assert ordered_share(torch.tensor([2**24 + 1]), torch.tensor([2**24])) == 1.0


def test_ordered_share_of_nothing_is_nan():
    scores, nothing = torch.ones(2), torch.ones(0)
    assert math.isnan(ordered_share(scores, nothing))
    assert math.isnan(ordered_share(nothing, scores))
    assert math.isnan(ordered_share(nothing, nothing))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_interval_has_the_published_bounds(successes, trials, low, high):
    # "Two-sided confidence intervals for the single proportion", Newcombe 1998, table I, method 3; the last mirrored
    assert_close(torch.tensor(wilson_interval(successes, trials)), torch.tensor([low, high]), rtol=0, atol=6e-5)


@properties
@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_are_where_the_normal_test_of_the_share_just_passes(counts):
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    for bound in (low, high):  # |share - p| = z sqrt(p (1 - p) / n), the equation that the interval solves
        distance = abs(successes / trials - bound)
        assert abs(distance - 1.959964 * (bound * (1 - bound) / trials) ** 0.5) < 1e-9


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 4), (5, 4)])
def test_wilson_interval_refuses_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match="an interval needs 0 <= successes <= trials and trials > 0"):
        wilson_interval(successes, trials)
