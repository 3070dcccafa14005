import math

import pytest
import torch
from hypothesis import given

from lightning_rlhf.functional.kl import kl_estimate
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

ESTIMATORS = ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
STRAIGHT_THROUGH = ["k1+", "k3+", "abs+"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = 0.5, -1, 0
        ("k1", [0.5, -1, 0]),
        ("k2", [0.125, 0.5, 0]),
        ("k3", [0.1065307, 0.7182818, 0]),  # 0.6065307 + 0.5 - 1;  2.7182818 - 1 - 1
        ("abs", [0.5, 1, 0]),
        ("k1+", [0.5, -1, 0]),
        ("k3+", [0.1065307, 0.7182818, 0]),
        ("abs+", [0.5, 1, 0]),
    ],
)
def test_estimates_of_a_case_worked_by_hand(estimator, expected):
    assert_close(kl_estimate(float64([-1, -3, -2]), float64([-1.5, -2, -2]), estimator), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = 0.5, -1, 0;  of k1: 1, of k2: d, of k3: 1 - exp(-d), of abs: the sign, of all with a plus: d
        ("k1", [1, 1, 1]),
        ("k2", [0.5, -1, 0]),
        ("k3", [0.3934693, -1.7182818, 0]),
        ("abs", [1, -1, 0]),
        ("k1+", [0.5, -1, 0]),
        ("k3+", [0.5, -1, 0]),
        ("abs+", [0.5, -1, 0]),
    ],
)
def test_gradients_of_a_case_worked_by_hand(estimator, expected):
    logprobs = float64([-1, -3, -2]).requires_grad_()
    kl_estimate(logprobs, float64([-1.5, -2, -2]), estimator).sum().backward()
    assert_close(logprobs.grad, expected, rtol=1e-6)


def test_clamp_limits_values_on_both_sides_and_removes_the_gradient_except_for_straight_through():
    for estimator, values, gradient in (
        ("k1", [2, -2, 0.5], [0, 0, 1]),  # d = 3, -4, 0.5
        ("k3", [2, 2, math.exp(-0.5) - 0.5], [0, 0, 1 - math.exp(-0.5)]),  # 2.0498, 49.6, 0.1065
        ("k3+", [2, 2, math.exp(-0.5) - 0.5], [3, -4, 0.5]),
    ):
        logprobs = float64([-1, -6, -1.5]).requires_grad_()
        estimate = kl_estimate(logprobs, float64([-4, -2, -2]), estimator, clamp=2.0)
        estimate.sum().backward()
        assert_close(estimate, values, rtol=1e-12)
        assert_close(logprobs.grad, gradient, rtol=1e-12)


def _by_loop(estimator, logprobs, reference):
    """Return Schulman 2020: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r, with r = reference / policy."""
    estimates = []
    for p, q in zip(logprobs, reference, strict=True):
        r = math.exp(q - p)
        kinds = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r), "abs": abs(math.log(r))}
        estimates.append(kinds[estimator.removesuffix("+")])
    return estimates


@properties
@given(seeds)
def test_estimates_follow_the_definition(seed):
    logprobs, reference = normal(8, seed=seed), normal(8, seed=seed + 1)
    for estimator in ESTIMATORS:
        expected = _by_loop(estimator, logprobs.tolist(), reference.tolist())
        assert_close(kl_estimate(logprobs, reference, estimator), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clamped_estimates_and_gradients_equal_those_of_verl(estimator):
    record = golden("corrections")
    logprobs = float64(record["inputs"]["logprobs"]).requires_grad_()
    clamp = 10.0 if estimator.startswith("k3") else None  # verl clamps k3 alone
    estimate = kl_estimate(logprobs, float64(record["inputs"]["ref_logprobs"]), estimator, clamp)
    estimate.sum().backward()
    expected = record["outputs"]["kl"][estimator]
    assert_close(estimate, expected["estimate"], rtol=1e-9, atol=1e-12)
    assert_close(logprobs.grad, expected["gradient"], rtol=1e-9, atol=1e-12)


def test_recorded_clamp_is_active():
    assert max(map(max, golden("corrections")["outputs"]["kl"]["k3"]["estimate"])) == 10


def test_k1_is_the_default():
    assert_close(kl_estimate(float64([-1]), float64([-3])), [2])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_estimates_equal_those_of_verl(estimator):
    recorded = golden("verl")
    logprobs, reference = (float64(recorded["inputs"][name]) for name in ("logprobs", "ref_logprobs"))
    assert_close(kl_estimate(logprobs, reference, estimator), recorded["outputs"]["kl"][estimator])


def _policies(seed, scale=1.0):
    """Return logits with gradient of a policy over 6 tokens, and log-probabilities of a reference."""
    return (scale * normal(6, seed=seed)).requires_grad_(), (scale * normal(6, seed=seed + 1)).log_softmax(-1)


@properties
@given(seeds)
def test_k1_and_k3_are_unbiased_and_k3_and_k2_are_not_negative(seed):
    logits, reference = _policies(seed)
    logprobs = logits.detach().log_softmax(-1)
    # the definition: sum over all tokens of p log(p / q)
    exact = sum(math.exp(p) * (p - q) for p, q in zip(logprobs.tolist(), reference.tolist(), strict=True))
    for estimator in ("k1", "k3"):
        assert_close((logprobs.exp() * kl_estimate(logprobs, reference, estimator)).sum(), exact)
    for estimator in ("k2", "k3", "abs"):
        assert (kl_estimate(logprobs, reference, estimator) >= 0).all()


@properties
@given(seeds)
def test_k2_agrees_with_the_divergence_of_close_policies(seed):
    logits, reference = _policies(seed, scale=1e-3)
    logprobs = logits.detach().log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    assert_close((logprobs.exp() * kl_estimate(logprobs, reference, "k2")).sum(), exact, rtol=1e-2, atol=0)


@properties
@given(seeds)
def test_expected_gradients_are_0_or_those_of_the_two_divergences(seed):
    logits, reference = _policies(seed)
    logprobs = logits.log_softmax(-1)

    def gradient(expectation):
        return torch.autograd.grad(expectation, logits, retain_graph=True)[0]

    exact = gradient((logprobs.exp() * (logprobs - reference)).sum())
    of_the_reverse = gradient((reference.exp() * (reference - logprobs)).sum())
    expected = {"k1": torch.zeros(6), "k2": exact, "k3": of_the_reverse} | dict.fromkeys(STRAIGHT_THROUGH, exact)
    for estimator, divergence in expected.items():
        over_samples = (logprobs.exp().detach() * kl_estimate(logprobs, reference, estimator)).sum()
        assert_close(gradient(over_samples), divergence, rtol=1e-9, atol=1e-12)


def test_k3_is_never_negative_in_float32():
    # exp(-d) + d - 1, taken literally, falls to -6e-8 here and is off by 100%
    difference = torch.linspace(-1e-2, 1e-2, 20001)
    estimate = kl_estimate(difference, torch.zeros_like(difference), "k3")
    assert (estimate >= 0).all()
    exact = [math.expm1(-d) + d for d in difference.tolist()]
    assert_close(estimate, exact, rtol=1e-2, atol=2e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_huge_differences_stay_finite(estimator, difference):
    logprobs = torch.tensor([difference], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1), estimator)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert estimator.startswith("k1") or estimate > 0


@pytest.mark.parametrize("estimator", STRAIGHT_THROUGH)
def test_straight_through_values_are_exact_next_to_a_huge_k2(estimator):
    logprobs = torch.tensor([-1e5 - 0.125, 3.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(2), estimator)
    assert (estimate == kl_estimate(logprobs, torch.zeros(2), estimator.removesuffix("+"))).all()


def test_k3_is_exact_down_to_minus_20_and_constant_beyond():
    logprobs = float64([-19.5, -20.5, -30, -torch.inf]).requires_grad_()
    estimate = kl_estimate(logprobs, torch.zeros(4, dtype=torch.float64), "k3")
    estimate.sum().backward()
    at_the_bound = math.exp(20) - 21
    assert_close(estimate, [math.exp(19.5) - 20.5, at_the_bound, at_the_bound, at_the_bound])
    assert_close(logprobs.grad, [1 - math.exp(19.5), 0, 0, 0])


def test_equal_policies_have_estimate_and_gradient_0_except_the_gradient_of_k1():
    for estimator, slope in {name: float(name == "k1") for name in ESTIMATORS}.items():
        logprobs = normal(2, 3, seed=1).requires_grad_()
        estimate = kl_estimate(logprobs, logprobs.detach(), estimator)
        estimate.sum().backward()
        assert_close(estimate, torch.zeros(2, 3))
        assert_close(logprobs.grad, torch.full((2, 3), slope))


def test_unknown_estimator_is_rejected_by_name():
    with pytest.raises(ValueError, match=r"^KL estimator must be one of k1, k2, k3, abs, k1\+, k3\+, abs\+, got 'k4'$"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
