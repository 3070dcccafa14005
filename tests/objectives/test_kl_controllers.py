import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL, KLTerm
from tests.helpers import assert_close, float64, golden, masks, normal, pad_columns, properties, seeds, with_garbage

ESTIMATORS = ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
terms = st.one_of(
    st.builds(KLTerm, estimator=st.sampled_from(ESTIMATORS), clamp=st.sampled_from([None, 0.5])),
    st.builds(KLTerm, estimator=st.sampled_from(["k1", "k3"]), importance=st.just(True)),
)


def test_default_term_is_disabled_with_k1():
    assert KLTerm() == KLTerm(coef=0.0, estimator="k1", clamp=None, importance=False)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_accepted(estimator):
    assert KLTerm(0.1, estimator).estimator == estimator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -0.1}, r"^KL coef must be at least 0, got -0.1$"),
        ({"estimator": "kl"}, r"^KL estimator must be one of k1, k2, k3, abs, k1\+, k3\+, abs\+, got 'kl'$"),
        ({"clamp": 0.0}, r"^KL clamp must be positive or null, got 0.0$"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        KLTerm(**arguments)


@pytest.mark.parametrize("estimator", ["k2", "abs", "k1+", "k3+", "abs+"])
def test_importance_needs_an_unbiased_estimator(estimator):
    with pytest.raises(ValueError, match=rf"use k1 or k3, got '{re.escape(estimator)}'$"):
        KLTerm(estimator=estimator, importance=True)


def test_importance_without_the_sampling_policy_is_rejected():
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"^a KL term with importance needs old_logprobs"):
        KLTerm(0.1, "k3", importance=True)(zeros, zeros, torch.ones(1, 1, dtype=torch.bool))


def test_importance_of_a_case_worked_by_hand():
    # p = 1/2, reference 1/4, drawn at 1/3: ratio 3/2; k1 = ln 2, k3 = 1/2 + ln 2 - 1
    logprobs, reference, old = (float64([[p]]).log() for p in (0.5, 0.25, 1 / 3))
    mask = torch.tensor([[True]])
    assert_close(KLTerm(1.0, "k1", importance=True)(logprobs, reference, mask, old), [[1.5 * 0.6931471806]], rtol=1e-9)
    assert_close(KLTerm(1.0, "k3", importance=True)(logprobs, reference, mask, old), [[1.5 * 0.1931471806]], rtol=1e-9)


@pytest.mark.parametrize("corrected", [False, True])
def test_losses_and_gradients_with_and_without_importance_equal_those_of_trl(corrected):
    record = golden("corrections")
    mask = float64(record["inputs"]["mask"]).bool()
    reference, old = (float64(record["inputs"][name]) for name in ("ref_logprobs", "old_logprobs"))
    logprobs = float64(record["inputs"]["logprobs"]).requires_grad_()
    loss = KLTerm(1.0, "k3", importance=corrected)(logprobs, reference, mask, old).sum() / mask.sum()
    loss.backward()
    expected = record["outputs"]["kl_trl"]["importance" if corrected else "plain"]
    assert_close(loss, expected["loss"], rtol=1e-9)
    assert_close(logprobs.grad, expected["gradient"], rtol=1e-9, atol=1e-12)


@properties
@given(seeds, st.sampled_from(["k1", "k3"]))
def test_with_importance_value_and_gradient_over_samples_of_an_old_policy_are_the_divergences(seed, estimator):
    # DeepSeek-V3.2, section 3.1, summed over all six tokens instead of sampled
    logits = normal(6, seed=seed).requires_grad_()
    old, reference = (normal(6, seed=seed + i).log_softmax(-1) for i in (1, 2))
    logprobs, mask = logits.log_softmax(-1), torch.ones(1, 6, dtype=torch.bool)
    exact = sum(p.exp() * (p - q) for p, q in zip(logprobs, reference, strict=True))
    term = KLTerm(1.0, estimator, importance=True)
    estimate = (old.exp() * term(logprobs[None], reference[None], mask, old[None])).sum()
    assert_close(estimate, exact, rtol=1e-9)
    gradients = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact))
    assert_close(next(gradients), next(gradients), rtol=1e-9, atol=1e-12)


@properties
@given(terms, masks(), seeds)
def test_values_outside_the_mask_affect_neither_value_nor_gradient(term, mask, seed):
    clean = [normal(*mask.shape, seed=seed + i).masked_fill(~mask, 0) for i in range(3)]
    values, gradients = [], []
    for tensors in (clean, [with_garbage(tensor, mask) for tensor in clean]):
        logprobs = tensors[0].requires_grad_()
        value = term(logprobs, tensors[1], mask, tensors[2])
        value.sum().backward()
        values.append(value)
        gradients.append(logprobs.grad)
    assert_close(values[1], values[0])
    assert_close(gradients[1], gradients[0])
    assert (values[1][~mask] == 0).all()
    assert (gradients[1][~mask] == 0).all()


@properties
@given(terms, masks(), seeds)
def test_term_is_its_estimate_inside_the_mask_row_by_row(term, mask, seed):
    logprobs, reference, old = (normal(*mask.shape, seed=seed + i) for i in range(3))
    value = term(logprobs, reference, mask, old)
    ratio = (logprobs - old).exp() if term.importance else 1.0
    assert_close(value[mask], (kl_estimate(logprobs, reference, term.estimator, term.clamp) * ratio)[mask], rtol=1e-12)
    inputs = (logprobs, reference, mask, old)
    rows = zip(*(tensor.split(1) for tensor in inputs), strict=True)
    assert_close(torch.cat([term(*row) for row in rows]), value)
    padded = term(*(pad_columns(tensor, 2) for tensor in inputs))
    assert_close(padded, pad_columns(value, 2))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("difference", [-1e4, -21.0, 21.0, 1e4])
def test_huge_ratio_stays_finite(estimator, difference):
    logprobs = torch.tensor([[difference]], requires_grad=True)
    term, mask = KLTerm(1.0, estimator, importance=True), torch.tensor([[True]])
    value = term(logprobs, torch.zeros(1, 1), mask, torch.zeros(1, 1))
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert abs(value.item()) <= abs(difference) * math.exp(20) * 1.001


def test_term_is_not_multiplied_by_its_coefficient():
    logprobs, mask = float64([[-1.0]]), torch.tensor([[True]])
    assert_close(KLTerm(0.25)(logprobs, logprobs - 2, mask), [[2]])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.0505),  # 10% above: 0.05 (1 + 0.1 * 100 / 1000)
        (5.4, 0.0495),
        (60.0, 0.051),  # far above: at most 20%
        (0.0, 0.049),
        (-3.0, 0.049),  # k1 may be negative
    ],
)
def test_coefficients_of_cases_worked_by_hand(kl, expected):
    assert_close(AdaptiveKL(target=6.0, horizon=1000)(0.05, kl, 100), expected)


def test_default_horizon_is_ten_thousand_responses():
    assert AdaptiveKL(target=1.0).horizon == 10000


@pytest.mark.parametrize("record", golden("verl")["outputs"]["adaptive_kl"], ids=lambda record: f"kl={record['kl']}")
def test_coefficients_equal_those_of_verl(record):
    controller = AdaptiveKL(record["target"], record["horizon"])
    assert_close(controller(record["coef"], record["kl"], record["responses"]), record["next"])


@properties
@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(-100, 100), st.integers(1, 512))
def test_coefficient_moves_towards_the_target_by_at_most_a_fifth_of_its_share(target, coef, kl, responses):
    change = AdaptiveKL(target, horizon=1000)(coef, kl, responses) / coef - 1
    assert abs(change) <= 0.2 * responses / 1000 + 1e-12
    assert change * (kl - target) >= 0


def test_controller_reaches_the_target():
    # a policy whose KL is 3 / coef: the fixed point is 1/2
    controller, coef = AdaptiveKL(target=6.0, horizon=100), 0.01
    for _ in range(200):
        coef = controller(coef, 3 / coef, 64)
    assert_close(coef, 0.5)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (-1.0, 10), (1.0, 0), (1.0, -5)])
def test_target_and_horizon_must_be_positive(target, horizon):
    with pytest.raises(ValueError, match=rf"^target and horizon must be positive, got {target=}, {horizon=}$"):
        AdaptiveKL(target, horizon)


def test_horizon_of_one_response_is_allowed():
    assert_close(AdaptiveKL(target=0.1, horizon=1)(0.05, 1.0, 1), 0.06)


def test_batch_larger_than_the_horizon_cannot_turn_the_coefficient_negative():
    assert AdaptiveKL(target=1.0, horizon=10)(0.1, kl=0.0, num_responses=1000) == pytest.approx(0.08)
