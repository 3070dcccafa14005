import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_rlhf.functional.data_ranks import ONE_RANK
from lightning_rlhf.functional.mismatch import (
    effective_fraction,
    maxima_over_ranks,
    means_over_ranks,
    mismatch_metrics,
    response_mean,
    spread_metrics,
    train_rollout_log_ratio,
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

# ours: verl's. verl's count a response without a token as one of log-probability 0; none is recorded.
VERLS = {
    "kl_k1": "kl",
    "kl_k3": "k3_kl",
    "ppl_train": "training_ppl",
    "log_ppl_train": "training_log_ppl",
    "ppl_rollout": "rollout_ppl",
    "log_ppl_rollout": "rollout_log_ppl",
    "log_ppl_diff_mean": "log_ppl_diff",
    "log_ppl_diff_abs_mean": "log_ppl_abs_diff",
    "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min",
    "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_sequence": "chi2_seq",
}


def logprobs_of(mask, seed):
    """Return log-probabilities of trained and rollout policy, at most 0."""
    rollout = -normal(*mask.shape, seed=seed).abs()
    return -(rollout + normal(*mask.shape, seed=seed + 1) / 2).abs(), rollout


def close(ours, expected, **tolerance):
    assert set(ours) == set(expected)
    for name, value in expected.items():
        assert_close(ours[name], value, equal_nan=True, **tolerance)


def test_metrics_of_a_case_worked_by_hand():
    # probabilities (train, rollout): (1/2, 1/4) (1/4, 1/2) | (1/2, 1/2) (padding): ratios 2, 1/2 | 1
    train = float64([[0.5, 0.25], [0.5, torch.nan]]).log()
    rollout = float64([[0.25, 0.5], [0.5, torch.inf]]).log()
    metrics = mismatch_metrics(train, rollout, torch.tensor([[True, True], [True, False]]))
    ln2 = 0.6931471805599453
    expected = {
        "kl_k1": 0,  # (-ln 2 + ln 2 + 0) / 3
        "kl_k3": 1 / 6,  # (2 - 1 - ln 2 + 1/2 - 1 + ln 2 + 0) / 3
        "chi2_token": 2.25 / 3,  # (4 + 1/4 + 1) / 3 - 1
        "chi2_sequence": 0,  # products 1 and 1
        "ess_token": 0.7777777777777778,  # (3.5 / 3)^2 / (5.25 / 3)
        "ess_sequence": 1,
        "log_ppl_train": 1.25 * ln2,  # (3/2 ln 2 + ln 2) / 2
        "log_ppl_rollout": 1.25 * ln2,
        "ppl_train": 2.414213562373095,  # (2 sqrt 2 + 2) / 2
        "ppl_rollout": 2.414213562373095,
        "ppl_ratio": 1,
        "ratio_mean": 3.5 / 3,
        "ratio_std": 0.6236095644623235,  # variance 5.25/3 - 12.25/9 = 7/18
        "ratio_max": 2,
        "ratio_min": 0.5,
        "prob_diff_mean": 0.5 / 3,
        "prob_diff_std": math.sqrt(2) / 3 / 4,
        "prob_diff_max": 0.25,
        "prob_diff_min": 0,
        "prob_correlation": -0.5,  # deviations (1, -2, 1)/12 and (-2, 1, 1)/12
    }
    for name, value in expected.items():
        assert_close(metrics[f"rollout_corr/{name}"], value, rtol=1e-12, atol=1e-12)
    assert_close(metrics["rollout_corr/sequence_ratio_mean"], 1)
    assert_close(metrics["rollout_corr/sequence_ratio_std"], 0)


def by_loops(train, rollout, mask):
    """Return the docstring's formulas over plain numbers."""
    responses = [
        [(p, q) for p, q, counts in zip(*row, strict=True) if counts]
        for row in zip(train.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    ]
    responses = [response for response in responses if response]
    tokens = [pair for response in responses for pair in response]
    ratios = [math.exp(p - q) for p, q in tokens]
    products = [math.exp(sum(p - q for p, q in response)) for response in responses]
    of_train, of_rollout = ([-statistics.fmean(pair[i] for pair in r) for r in responses] for i in (0, 1))
    differences = [a - b for a, b in zip(of_train, of_rollout, strict=True)]
    mean = statistics.fmean
    expected = {
        "kl_k1": mean(q - p for p, q in tokens),
        "kl_k3": mean(math.exp(p - q) - 1 - (p - q) for p, q in tokens),
        "chi2_token": mean(r * r for r in ratios) - 1,
        "chi2_sequence": mean(r * r for r in products) - 1,
        "ess_token": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
        "ess_sequence": sum(products) ** 2 / (len(products) * sum(r * r for r in products)),
        "log_ppl_train": mean(of_train),
        "log_ppl_rollout": mean(of_rollout),
        "ppl_train": mean(map(math.exp, of_train)),
        "ppl_rollout": mean(map(math.exp, of_rollout)),
        "ppl_ratio": mean(map(math.exp, differences)),
        "log_ppl_diff_abs_mean": mean(map(abs, differences)),
    }
    gaps = [abs(math.exp(p) - math.exp(q)) for p, q in tokens]
    samples = {"ratio": ratios, "sequence_ratio": products, "log_ppl_diff": differences}
    for name, values in (samples | {"prob_diff": gaps}).items():
        expected |= {f"{name}_mean": mean(values), f"{name}_std": statistics.pstdev(values)}
        expected |= {f"{name}_max": max(values), f"{name}_min": min(values)}
    probabilities = [[math.exp(pair[i]) for pair in tokens] for i in (0, 1)]
    expected["prob_correlation"] = statistics.correlation(*probabilities) if len(tokens) > 1 else math.nan
    return {f"rollout_corr/{name}": value for name, value in expected.items()}


@properties
@given(masks(), seeds)
def test_metrics_follow_their_formulas(mask, seed):
    assume(mask.any())
    train, rollout = logprobs_of(mask, seed)
    metrics = mismatch_metrics(with_garbage(train, mask), with_garbage(rollout, mask), mask)
    close(metrics, by_loops(train, rollout, mask), rtol=1e-9, atol=1e-9)
    for name in ("ess_token", "ess_sequence"):
        assert 0 < metrics[f"rollout_corr/{name}"] <= 1 + 1e-12


def test_metrics_equal_those_of_verl():
    record = golden("corrections")
    train, rollout, mask = (float64(record["inputs"][n]) for n in ("old_logprobs", "rollout_logprobs", "mask"))
    metrics = mismatch_metrics(train, rollout, mask.bool())
    expected = record["outputs"]["presets"]["disabled"]["metrics"]
    assert set(expected) == set(VERLS.values())
    for ours, verls in VERLS.items():
        # verl divides by counts + 1e-8
        assert_close(metrics[f"rollout_corr/{ours}"], expected[verls], rtol=1e-7, atol=1e-8)


@properties
@given(masks(min_rows=2), seeds, st.integers(0, 5))
def test_metrics_are_those_of_all_ranks(mask, seed, first):
    train, rollout = logprobs_of(mask, seed)

    def rank(rows):
        return lambda ranks: mismatch_metrics(train[rows], rollout[rows], mask[rows], ranks)

    expected = mismatch_metrics(train, rollout, mask)
    for metrics in over_ranks(rank(slice(first)), rank(slice(first, None))):
        close(metrics, expected, rtol=1e-9, atol=1e-9)


@properties
@given(masks(), seeds)
def test_padding_the_order_of_responses_and_empty_ones_change_nothing(mask, seed):
    train, rollout = logprobs_of(mask, seed)
    expected = mismatch_metrics(train, rollout, mask)
    close(mismatch_metrics(*(pad_columns(t, 3) for t in (train, rollout, mask))), expected, rtol=1e-9, atol=1e-9)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    close(mismatch_metrics(train[order], rollout[order], mask[order]), expected, rtol=1e-9, atol=1e-9)
    longer = (torch.cat([t, torch.zeros_like(t)]) for t in (train, rollout, mask))
    close(mismatch_metrics(*longer), expected, rtol=1e-9, atol=1e-9)


@properties
@given(masks(), seeds)
def test_equal_policies_have_no_mismatch(mask, seed):
    assume(mask.any())
    train, _ = logprobs_of(mask, seed)
    metrics = mismatch_metrics(train.float(), train.float(), mask)
    ones = {"ppl_ratio", "ess_token", "ess_sequence"}
    ones |= {f"{name}_{end}" for name in ("ratio", "sequence_ratio") for end in ("mean", "max", "min")}
    for name, value in metrics.items():
        short = name.removeprefix("rollout_corr/")
        if not short.startswith(("ppl_t", "ppl_ro", "log_ppl_t", "log_ppl_ro", "prob_corr")):
            assert value == float(short in ones), name


def test_deviation_of_equal_values_is_exactly_0():
    values, mask = torch.full((7, 3), 0.9), torch.ones(7, 3, dtype=torch.bool)
    assert spread_metrics({"x": (values, mask)}, ONE_RANK)["x_std"] < 1e-15


def test_constant_probabilities_have_no_correlation():
    train, mask = torch.full((3, 7), -0.1), torch.ones(3, 7, dtype=torch.bool)
    assert math.isnan(mismatch_metrics(train, normal(3, 7, seed=1), mask)["rollout_corr/prob_correlation"])


@pytest.mark.parametrize(("reach", "expected"), [(1.2e-12, 1.0), (0.8e-12, math.nan)])
def test_correlation_requires_variation_beyond_rounding(reach, expected):
    logprobs, mask = float64([[0.1 - reach, 0.1 + reach]]).log(), torch.ones(1, 2, dtype=torch.bool)
    ours = mismatch_metrics(logprobs, logprobs, mask)["rollout_corr/prob_correlation"]
    assert_close(ours, expected, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("difference", "expected"), [(15.0, 20.0), (-15.0, -20.0), (7.0, 14.0)])
def test_log_ratio_of_a_response_is_clamped(difference, expected):
    train, mask = torch.full((1, 2), difference - 15), torch.ones(1, 2, dtype=torch.bool)
    metrics = mismatch_metrics(train, torch.full((1, 2), -15.0), mask)
    assert_close(math.log(metrics["rollout_corr/sequence_ratio_mean"]), expected, rtol=1e-12)
    assert_close(metrics["rollout_corr/chi2_sequence"], math.expm1(2 * expected), rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_metrics_without_tokens_are_nan(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    metrics = mismatch_metrics(torch.zeros(shape), torch.zeros(shape), mask)
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("difference", [-math.inf, -1e4, 1e4])
def test_huge_differences_give_finite_divergences(difference):
    train = torch.tensor([[difference, -1.0]])
    metrics = mismatch_metrics(train, torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool))
    unbounded = {name for name, value in metrics.items() if not math.isfinite(value)}
    assert unbounded <= {"rollout_corr/log_ppl_train", "rollout_corr/prob_diff_mean", "rollout_corr/prob_diff_std",
                         "rollout_corr/prob_diff_max", "rollout_corr/prob_correlation"}  # fmt: skip
    assert_close(max(abs(math.log(metrics[f"rollout_corr/ratio_{end}"])) for end in ("max", "min")), 20)


def test_log_ratios_are_of_train_over_rollout_clamped_at_20_without_gradient_and_0_outside():
    train = float64([[-1, -1, -30, -1, torch.nan]]).requires_grad_()
    rollout = float64([[-2, -0.5, -1, -30, 1]]).requires_grad_()
    log_ratio = train_rollout_log_ratio(train, rollout, torch.tensor([[True, True, True, True, False]]))
    assert_close(log_ratio, [[1, -0.5, -20, 20, 0]])
    assert not log_ratio.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metrics_of_lower_precision_are_computed_in_float64(dtype):
    mask = torch.ones(40, 50, dtype=torch.bool)
    train, rollout = (values.to(dtype) for values in logprobs_of(mask, 3))
    assert mismatch_metrics(train, rollout, mask) == mismatch_metrics(train.double(), rollout.double(), mask)


def test_effective_fraction_of_cases_worked_by_hand():
    assert_close(effective_fraction(1.0, 0.0), 1)
    assert_close(effective_fraction(2.0, 1.0), 0.8)  # weights 1 and 3: 16 / (2 * 10)
    assert effective_fraction(0.0, 0.0) == 0
    assert math.isnan(effective_fraction(math.nan, math.nan))


def test_means_and_maxima_of_a_case_worked_by_hand():
    values, mask = float64([[1, 2, torch.nan], [4, torch.inf, -torch.inf]]), torch.tensor([[True, True, False]] * 2)
    mask[1, 1] = False
    none = torch.zeros_like(mask)
    assert_close(response_mean(values, mask), [1.5, 4])
    assert_close(response_mean(values, none), [0, 0])
    parts = {"some": (values, mask), "none": (values, none)}
    assert_close(list(means_over_ranks(parts, ONE_RANK).values()), [7 / 3, math.nan], equal_nan=True)
    assert_close(list(maxima_over_ranks(parts, ONE_RANK).values()), [4, math.nan], equal_nan=True)
