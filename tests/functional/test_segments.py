"""Segment statistics; no other library has these functions, but tests/objectives compares their callers with verl."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.segments import segment_centered, segment_max, segment_std, segment_sum
from tests.helpers import assert_close, float64, normal, properties, seeds

SEGMENT = torch.tensor([7, 2, 7, 2, 7])
VALUES = float64([1, 10, 2, 30, 6])
ALL = torch.ones(5, dtype=torch.bool)


@st.composite
def segments(draw):
    """Generate values, their segments, and a mask; values outside the mask are NaN or infinite."""
    rows = draw(st.integers(1, 9))
    segment = torch.tensor(draw(st.lists(st.sampled_from([-4, 0, 5]), min_size=rows, max_size=rows)))
    member = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    garbage = torch.tensor(
        draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), min_size=rows, max_size=rows))
    )
    values = normal(rows, seed=draw(seeds))
    return torch.where(member, values, garbage.double()), segment, member


def _same(segment, member, row):
    return [other for other in range(len(segment)) if segment[other] == segment[row] and member[other]]


def test_sums_maxima_means_and_deviations_worked_by_hand():
    # segment 7 holds 1, 2, 6: sum 9, mean 3, squared deviations 4 + 1 + 9 = 14, variance 7
    # segment 2 holds 10, 30: sum 40, mean 20, squared deviations 200, variance 200
    assert_close(segment_sum(VALUES, SEGMENT), [9, 40, 9, 40, 9], rtol=0, atol=0)
    assert_close(segment_max(VALUES, SEGMENT), [6, 30, 6, 30, 6], rtol=0, atol=0)
    assert_close(segment_centered(VALUES, SEGMENT, ALL), [-2, -10, -1, 10, 3], rtol=1e-14)
    deviations = [7**0.5, 200**0.5, 7**0.5, 200**0.5, 7**0.5]
    assert_close(segment_std(VALUES, SEGMENT, ALL), deviations, rtol=1e-14)


def test_weighted_means_worked_by_hand():
    # segment 7: (1 x 1 + 2 x 2 + 6 x 1) / 4 = 11/4; segment 2: only the second value counts
    weights = torch.tensor([1, 0, 2, 3, 1])
    assert_close(segment_centered(VALUES, SEGMENT, weights), [-1.75, 0, -0.75, 0, 3.25], rtol=1e-14)


def test_half_precision_and_integers_are_computed_in_float64():
    for values in (VALUES.half(), VALUES.long()):
        assert_close(segment_std(values, SEGMENT, ALL)[0], 7**0.5, rtol=1e-14)
        for result in (
            segment_sum(values, SEGMENT),
            segment_max(values, SEGMENT),
            segment_centered(values, SEGMENT, ALL),
            segment_std(values, SEGMENT, ALL),
        ):
            assert result.dtype == torch.float64


def test_sums_of_rows_are_taken_column_by_column():
    rows = torch.stack([VALUES, -VALUES], dim=1)
    assert_close(segment_sum(rows, SEGMENT), [[9, -9], [40, -40], [9, -9], [40, -40], [9, -9]], rtol=0, atol=0)


@properties
@given(segments())
def test_every_statistic_is_that_of_a_loop_over_rows(case):
    values, segment, member = case
    centered, std = segment_centered(values, segment, member), segment_std(values, segment, member)
    total = segment_sum(values.masked_fill(~member, 0), segment)
    largest = segment_max(values.masked_fill(~member, -math.inf), segment)
    for row in range(len(values)):
        numbers = [values[other].item() for other in _same(segment, member, row)]
        mean = math.fsum(numbers) / len(numbers) if member[row] else 0
        assert_close(total[row], math.fsum(numbers), rtol=1e-12, atol=1e-14)
        assert largest[row] == max(numbers, default=-math.inf)
        assert_close(centered[row], values[row] - mean if member[row] else 0, rtol=1e-12, atol=1e-14)
        assert_close(std[row], statistics.stdev(numbers) if len(numbers) > 1 else 0, rtol=1e-9, atol=1e-14)


@properties
@given(segments(), seeds)
def test_weighted_means_are_those_of_a_loop_over_rows(case, seed):
    values, segment, member = case
    weights = torch.where(member, normal(len(values), seed=seed).abs() + 0.1, 0)
    centered = segment_centered(values, segment, weights)
    for row in member.nonzero().flatten().tolist():
        others = _same(segment, member, row)
        mean = math.fsum((weights[i] * values[i]).item() for i in others) / math.fsum(weights[i].item() for i in others)
        assert_close(centered[row], values[row] - mean, rtol=1e-11, atol=1e-13)
    assert (centered[~member] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.9, 0.1, -1e9 + 0.3, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_values_have_neither_spread_nor_distance_to_their_mean(value, size, dtype):
    values = torch.full((size,), value, dtype=dtype)
    segment, member = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
    assert (segment_centered(values, segment, member) == 0).all()
    assert (segment_std(values, segment, member) == 0).all()


def test_large_common_offset_keeps_precision():
    values = float64([1e9 + 1, 1e9 + 2, 1e9 + 6])
    segment, member = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    assert_close(segment_std(values, segment, member), [7**0.5] * 3, rtol=1e-12)
    assert_close(segment_centered(values, segment, member), [-2, -1, 3], rtol=1e-12)


@properties
@given(segments(), seeds)
def test_order_of_rows_and_names_of_segments_change_nothing(case, seed):
    values, segment, member = case
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    renamed = (segment * -31 + 6)[order]
    for statistic in (segment_centered, segment_std):
        moved = statistic(values[order], renamed, member[order])
        assert_close(moved, statistic(values, segment, member)[order], rtol=1e-11, atol=1e-13)


def test_empty_input_gives_empty_output():
    none, rows = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    assert segment_sum(torch.zeros(0, 3), none).shape == (0, 3)
    assert segment_std(rows, none, rows.bool()).shape == (0,)
    assert segment_centered(rows, none, rows.bool()).shape == (0,)
