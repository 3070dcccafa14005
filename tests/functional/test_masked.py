import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.masked import (
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
    rewards_at_tokens,
)
from tests.helpers import (
    assert_close,
    float64,
    golden,
    masks,
    normal,
    over_ranks,
    pad_columns,
    properties,
    seeds,
    with_garbage,
)

# 1, 2 and 4 count; 9 does not.
VALUES = float64([[1, 2, 9], [4, 9, 9]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_sum_mean_variance_and_whitening_of_a_case_worked_by_hand():
    # 1 + 2 + 4 = 7;  mean 7/3;  squares (16 + 1 + 25)/9 = 42/9, over n - 1 = 2: variance 7/3
    assert_close(masked_sum(VALUES, MASK), 7)
    assert_close(masked_mean(VALUES, MASK), 7 / 3)
    assert_close(masked_variance(VALUES, MASK), 7 / 3)
    # (-4/3, -1/3, 5/3) / 1.5275252
    assert_close(masked_whiten(VALUES, MASK), [[-0.8728716, -0.2182179, 0], [1.0910895, 0, 0]], rtol=1e-6)


@properties
@given(masks(), seeds)
def test_mean_and_variance_are_those_of_the_standard_library(mask, seed):
    values = normal(*mask.shape, seed=seed)
    inside = [value for value, counts in zip(values.flatten().tolist(), mask.flatten().tolist(), strict=True) if counts]
    assert_close(masked_sum(values, mask), math.fsum(inside))
    assert_close(masked_mean(values, mask), statistics.fmean(inside) if inside else 0.0)
    assert_close(masked_variance(values, mask), statistics.variance(inside) if len(inside) > 1 else 0.0)


def test_whitening_equals_that_of_verl():
    recorded = golden("verl")
    mask = float64(recorded["inputs"]["mask"]).bool()
    ours = masked_whiten(float64(recorded["inputs"]["rewards"]), mask)
    assert_close(ours[mask], float64(recorded["outputs"]["masked_whiten"])[mask])


@properties
@given(masks(), seeds)
def test_values_outside_the_mask_may_be_anything(mask, seed):
    values = normal(*mask.shape, seed=seed)
    dirty = with_garbage(values, mask)
    for function in (masked_sum, masked_mean, masked_variance, masked_whiten):
        assert_close(function(dirty, mask), function(values.masked_fill(~mask, 0), mask))


@properties
@given(masks(), st.integers(1, 3), seeds)
def test_padding_changes_nothing(mask, columns, seed):
    values = normal(*mask.shape, seed=seed)
    padded_mask = pad_columns(mask, columns)
    padded = with_garbage(pad_columns(values, columns), padded_mask)
    for function in (masked_sum, masked_mean, masked_variance):
        assert_close(function(padded, padded_mask), function(values, mask))
    assert_close(masked_whiten(padded, padded_mask), pad_columns(masked_whiten(values, mask), columns))


@properties
@given(masks(), seeds)
def test_permuting_rows_permutes_whitened_rows(mask, seed):
    values = normal(*mask.shape, seed=seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    assert_close(masked_whiten(values[order], mask[order]), masked_whiten(values, mask)[order])


@properties
@given(masks(), seeds, st.floats(-100, 100), st.floats(0.1, 100))
def test_whitened_values_have_mean_0_and_variance_1(mask, seed, shift, scale):
    mask[0, 0] = True
    mask = pad_columns(mask, 1)
    mask[-1, -1] = True  # at least two values
    whitened = masked_whiten(shift + scale * normal(*mask.shape, seed=seed), mask)
    assert (whitened[~mask] == 0).all()
    assert_close(whitened[mask].mean(), 0.0)
    assert_close(whitened[mask].var(), 1.0, rtol=1e-3)  # eps shrinks nearly equal values


@properties
@given(masks(min_rows=2), seeds, st.data())
def test_ranks_together_compute_what_one_rank_computes(mask, seed, data):
    values = normal(*mask.shape, seed=seed) + 3
    first, second = sorted(data.draw(st.integers(0, len(mask))) for _ in range(2))
    shards = [slice(0, first), slice(first, second), slice(second, None)]  # a rank may have no rows at all

    def each_rank(function):
        return over_ranks(*(lambda ranks, s=shard: function(values[s], mask[s], ranks) for shard in shards))

    for function in (masked_mean, masked_variance):
        for result in each_rank(function):
            assert_close(result, function(values, mask))
    assert_close(torch.cat(each_rank(masked_whiten)), masked_whiten(values, mask))


def test_empty_mask_gives_zeros_and_not_nan():
    nothing = torch.zeros_like(MASK)
    for function in (masked_sum, masked_mean, masked_variance):
        assert_close(function(VALUES, nothing), 0)
    assert_close(masked_whiten(VALUES, nothing), torch.zeros(2, 3))


def test_one_value_has_variance_0_and_whitens_to_0():
    only_one = torch.tensor([[False, True, False], [False, False, False]])
    assert_close(masked_mean(VALUES, only_one), 2)
    assert_close(masked_variance(VALUES, only_one), 0)
    assert_close(masked_whiten(VALUES, only_one), torch.zeros(2, 3))


@properties
@given(masks(), st.floats(-1000, 1000))
def test_equal_values_whiten_to_0(mask, value):
    assert_close(masked_whiten(torch.full(mask.shape, value, dtype=torch.float64), mask), torch.zeros(mask.shape))


@pytest.mark.parametrize(("value", "count"), [(1000.1, 3), (1000.1, 1000), (-7.3, 17)])
def test_equal_values_whiten_to_0_in_float32(value, count):
    # the mean of three times 1000.1 is not 1000.1 in float32, and rsqrt(eps) = 1e4 would show it
    whitened = masked_whiten(torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool))
    assert whitened.abs().max() < 1e-6


def test_variance_survives_a_large_mean_in_float32():
    # E[x^2] - E[x]^2 gives 0 or thousands here
    values = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]])
    assert_close(masked_variance(values, torch.ones(1, 3, dtype=torch.bool)), 1.0)


def test_eps_is_added_to_the_variance():
    everything = torch.ones(1, 2, dtype=torch.bool)
    # variance 2e-8, default eps 1e-8: 1e-4 / sqrt(3e-8)
    assert_close(masked_whiten(float64([[0, 2e-4]]), everything), [[-0.5773503, 0.5773503]], rtol=1e-6)
    # variance 2, eps 2: 1 / sqrt(4)
    assert_close(masked_whiten(float64([[0, 2]]), everything, eps=2), [[-0.5, 0.5]])


def test_gradients_of_the_mean_reach_only_the_mask():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    assert_close(values.grad, [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]])


def test_assert_close_rejects_large_tolerances():
    with pytest.raises(ValueError, match=r"rtol and atol must lie in \[0, 1e-2\], got rtol=1000000.0"):
        assert_close(1.0, 1.0, rtol=1e6)
    with pytest.raises(ValueError, match=r"atol=0\.1$"):
        assert_close(1.0, 1.0, atol=0.1)
    with pytest.raises(AssertionError):
        assert_close(1.0, 1.0001)
    with pytest.raises(AssertionError):
        assert_close(math.nan, math.nan)
    with pytest.raises(AssertionError):
        assert_close(torch.ones(2), torch.ones(1, 2))


def test_rewards_are_at_the_last_token_of_the_policy_or_where_a_step_earned_them():
    mask = torch.tensor([[True, True, False, True, False], [False, True, False, False, False]])
    reward = torch.tensor([2.0, -1.0])
    expected = torch.tensor([[0.0, 0.0, 0.0, 2.0, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(rewards_at_tokens(reward, mask), expected)
    steps = torch.tensor([[0.5, 0.0, 0.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.5, 0.0, 0.0, 1.5, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])  # 2 - 0.5 in all, -1
    assert torch.equal(rewards_at_tokens(reward, mask, steps), expected)
