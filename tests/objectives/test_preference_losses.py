import math

import pytest
import torch
from hypothesis import given

from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from tests.helpers import assert_close, float64, golden, normal, properties, seeds


def test_loss_of_a_case_worked_by_hand():
    # differences 1, 0, -2:  ln(1 + e^-1), ln 2, ln(1 + e^2)
    chosen, rejected = float64([2, 1, -1]), float64([1, 1, 1])
    assert_close(PairwiseLoss()(chosen, rejected), [0.3132617, 0.6931472, 2.1269280])
    # a margin of 1 makes it 0, -1, -3
    assert_close(PairwiseLoss()(chosen, rejected, torch.ones(3)), [0.6931472, 1.3132617, 3.0485874])
    # sums 3, 2, 0: plus 9/2, 4/2, 0
    assert_close(PairwiseLoss(center_coef=0.5)(chosen, rejected), [4.8132617, 2.6931472, 2.1269280])


def test_scores_are_not_centered_by_default():
    assert PairwiseLoss() == PairwiseLoss(center_coef=0.0)


@properties
@given(seeds)
def test_loss_is_minus_the_log_of_the_bradley_terry_probability(seed):
    chosen, rejected, margin = (3 * normal(4, seed=seed + i) for i in range(3))
    loss = PairwiseLoss(center_coef=0.1)(chosen, rejected, margin)
    for ours, a, b, m in zip(*(tensor.tolist() for tensor in (loss, chosen, rejected, margin)), strict=True):
        probability = math.exp(a) / (math.exp(a) + math.exp(b + m))
        assert_close(ours, -math.log(probability) + 0.1 * (a + b) ** 2)


@properties
@given(seeds)
def test_loss_equals_cross_entropy_in_torch_between_the_two_answers(seed):
    chosen, rejected, margin = (3 * normal(4, seed=seed + i) for i in range(3))
    logits = torch.stack([chosen - margin, rejected], dim=1)
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long), reduction="none")
    assert_close(PairwiseLoss()(chosen, rejected, margin), expected)


@pytest.mark.parametrize("case", golden("peers")["pairwise_loss"]["cases"])
def test_loss_and_gradient_equal_those_of_trl(case):
    inputs, expected = case["inputs"], {name: float64(numbers) for name, numbers in case["outputs"].items()}
    chosen, rejected = (float64(inputs[name]).requires_grad_() for name in ("chosen", "rejected"))
    margin = None if inputs["margin"] is None else float64(inputs["margin"])
    loss = PairwiseLoss(inputs["center_coef"] or 0.0)(chosen, rejected, margin)
    loss.mean().backward()
    assert_close(loss, expected["losses"], rtol=1e-9, atol=1e-12)
    assert_close(loss.mean(), expected["mean"], rtol=1e-9, atol=1e-12)
    assert_close(chosen.grad, expected["gradient_chosen"], rtol=1e-9, atol=1e-12)
    assert_close(rejected.grad, expected["gradient_rejected"], rtol=1e-9, atol=1e-12)


def test_recorded_pairs_include_margin_and_centering():
    inputs = [case["inputs"] for case in golden("peers")["pairwise_loss"]["cases"]]
    terms = {(case["margin"] is None, case["center_coef"] is None) for case in inputs}
    assert terms == {(False, False), (False, True), (True, False), (True, True)}


@properties
@given(seeds)
def test_gradient_separates_the_scores_by_the_probability_of_an_error(seed):
    chosen, rejected = (normal(4, seed=seed + i).requires_grad_() for i in range(2))
    PairwiseLoss()(chosen, rejected).sum().backward()
    error = 1 / (1 + (chosen - rejected).detach().exp())
    assert_close(chosen.grad, -error)
    assert_close(rejected.grad, error)


@properties
@given(seeds)
def test_swapping_the_answers_gives_the_loss_of_the_other_choice(seed):
    chosen, rejected = (normal(4, seed=seed + i) for i in range(2))
    # the two probabilities sum to 1
    loss = PairwiseLoss()
    assert_close((-loss(chosen, rejected)).exp() + (-loss(rejected, chosen)).exp(), torch.ones(4))


@properties
@given(seeds)
def test_permuting_pairs_permutes_losses(seed):
    tensors = [normal(5, seed=seed + i) for i in range(3)]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    loss = PairwiseLoss(0.3)
    assert_close(loss(*(tensor[order] for tensor in tensors)), loss(*tensors)[order])


def test_only_the_difference_of_scores_counts_without_centering():
    chosen, rejected = normal(4, seed=0), normal(4, seed=1)
    assert_close(PairwiseLoss()(chosen + 7, rejected + 7), PairwiseLoss()(chosen, rejected))
    assert (PairwiseLoss(0.1)(chosen + 7, rejected + 7) > PairwiseLoss(0.1)(chosen, rejected)).all()


def test_huge_differences_stay_finite():
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = PairwiseLoss()(chosen, torch.zeros(2))
    loss.sum().backward()
    assert_close(loss, [0, 1e4])
    assert_close(chosen.grad, [0, -1])


def test_negative_weight_is_rejected():
    with pytest.raises(ValueError, match=r"^center_coef must be at least 0, got -0.1$"):
        PairwiseLoss(center_coef=-0.1)
