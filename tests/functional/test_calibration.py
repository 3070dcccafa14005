"""Calibration of sigmoid(score difference) as a probability."""

import math

import torch
from hypothesis import given
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_rlhf.functional.diagnostics import calibration_bins, calibration_error
from tests.helpers import assert_close, float64, normal, properties, seeds


def odds(*probabilities):
    return float64([math.log(p / (1 - p)) for p in probabilities])


def test_case_worked_by_hand():
    # sure of 0.61, 0.64 (right, wrong), 0.92 (right); bins of 0.05 from 0.5
    bins = calibration_bins(odds(0.61, 0.36, 0.92))
    assert bins[0].tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 1, 0]
    # |1 - (0.61 + 0.64)| + |1 - 0.92| over 3 pairs
    assert_close(calibration_error(bins), (0.25 + 0.08) / 3)
    # no difference: sure of a half, and half right
    assert calibration_error(calibration_bins(torch.zeros(4))) == 0
    assert math.isnan(calibration_error(calibration_bins(torch.zeros(0))))


@properties
@given(seeds)
def test_calibration_error_equals_a_loop_from_the_paper_and_torchmetrics(seed):
    difference = 2 * normal(50, seed=seed)
    inside = [[] for _ in range(10)]
    for x in difference.tolist():
        sure = 1 / (1 + math.exp(-abs(x)))
        inside[min(int((sure - 0.5) / 0.05), 9)].append((sure, float(x > 0)))
    expected = sum(len(b) / 50 * abs(sum(r for _, r in b) - sum(s for s, _ in b)) / len(b) for b in inside if b)
    error = calibration_error(calibration_bins(difference))
    assert_close(error, expected, rtol=1e-9)
    # its bins divide [0, 1], of which the more likely of two classes only reaches the upper half
    chances = torch.stack([(-difference).sigmoid(), difference.sigmoid()], dim=1)
    theirs = multiclass_calibration_error(chances, torch.ones(50).long(), num_classes=2, n_bins=20, norm="l1")
    assert_close(error, theirs, rtol=1e-5)


def test_calibrated_scores_have_a_small_error_and_doubled_ones_do_not():
    draw = torch.Generator().manual_seed(0)
    difference = 2 * torch.randn(200_000, generator=draw, dtype=torch.float64)
    right = torch.rand(200_000, generator=draw, dtype=torch.float64) < difference.abs().sigmoid()
    message = torch.where(right, difference.abs(), -difference.abs())
    assert calibration_error(calibration_bins(message)) < 0.005
    assert calibration_error(calibration_bins(2 * message)) > 0.05


@properties
@given(seeds)
def test_bins_add_up_over_batches_and_ranks(seed):
    difference = 2 * normal(30, seed=seed)
    parts = sum(calibration_bins(part) for part in difference.split(7))
    assert_close(parts, calibration_bins(difference), rtol=1e-12)


def test_infinite_and_tiny_differences_have_a_bin():
    bins = calibration_bins(float64([math.inf, -math.inf, 1e-300, 800]))
    assert bins[0].tolist() == [1, *([0] * 8), 3]


def test_error_is_nan_if_a_score_is():
    assert math.isnan(calibration_error(calibration_bins(torch.tensor([0.5, math.nan]))))
