import math

import pytest
import torch
from hypothesis import given

from lightning_rlhf.functional.kl import kl_estimate
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

ESTIMATORS = ["k1", "k2", "k3", "abs"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = 0.5, -1, 0
        ("k1", [0.5, -1, 0]),
        ("k2", [0.125, 0.5, 0]),
        ("k3", [0.1065307, 0.7182818, 0]),  # 0.6065307 + 0.5 - 1;  2.7182818 - 1 - 1
        ("abs", [0.5, 1, 0]),
    ],
)
def test_estimates_of_a_case_worked_by_hand(estimator, expected):
    assert_close(kl_estimate(float64([-1, -3, -2]), float64([-1.5, -2, -2]), estimator), expected, rtol=1e-6)


def test_k1_is_the_default():
    assert_close(kl_estimate(float64([-1]), float64([-3])), [2])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_verls(estimator):
    recorded = golden("verl")
    logprobs, reference = (float64(recorded["inputs"][name]) for name in ("logprobs", "ref_logprobs"))
    assert_close(kl_estimate(logprobs, reference, estimator), recorded["outputs"]["kl"][estimator])


def _policies(seed, scale=1.0):
    """Logits with gradient of a policy over 6 tokens, and log-probabilities of a reference."""
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
def test_the_expected_gradient_of_k1_is_0_and_that_of_k2_is_the_divergences(seed):
    logits, reference = _policies(seed)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for estimator, expected in (("k1", torch.zeros(6)), ("k2", exact)):
        over_samples = (logprobs.exp().detach() * kl_estimate(logprobs, reference, estimator)).sum()
        (gradient,) = torch.autograd.grad(over_samples, logits, retain_graph=True)
        assert_close(gradient, expected)


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
    assert estimator == "k1" or estimate > 0


def test_k3_is_exact_down_to_minus_20_and_flat_beyond():
    logprobs = float64([-19.5, -20.5, -30, -torch.inf]).requires_grad_()
    estimate = kl_estimate(logprobs, torch.zeros(4, dtype=torch.float64), "k3")
    estimate.sum().backward()
    at_the_bound = math.exp(20) - 21
    assert_close(estimate, [math.exp(19.5) - 20.5, at_the_bound, at_the_bound, at_the_bound])
    assert_close(logprobs.grad, [1 - math.exp(19.5), 0, 0, 0])


def test_equal_policies_are_0_apart_with_gradient_0_except_k1():
    for estimator, slope in (("k1", 1.0), ("k2", 0.0), ("k3", 0.0), ("abs", 0.0)):
        logprobs = normal(2, 3, seed=1).requires_grad_()
        estimate = kl_estimate(logprobs, logprobs.detach(), estimator)
        estimate.sum().backward()
        assert_close(estimate, torch.zeros(2, 3))
        assert_close(logprobs.grad, torch.full((2, 3), slope))


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^KL estimator must be one of k1, k2, k3, abs, got 'k4'$"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
