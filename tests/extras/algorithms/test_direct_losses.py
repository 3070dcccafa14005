"""Losses of preference learning: by hand, by a loop from the paper, by TRL's numbers, by properties."""

import math

import pytest
import torch
from hypothesis import given

from lightning_rlhf.extras.algorithms.group_advantages import BestAgainstWorst
from lightning_rlhf.extras.algorithms.preference_losses import (
    APODownLoss,
    APOZeroLoss,
    DPOLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    REBELLoss,
    RobustDPOLoss,
    SimPOLoss,
)
from lightning_rlhf.objectives.base import AdvantageInputs
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

RECORDED = golden("preferences")
KINDS = {"sigmoid": DPOLoss, "robust": RobustDPOLoss, "hinge": HingeLoss, "ipo": IPOLoss, "sigmoid_norm": DPOLoss}
EVERY = (
    DPOLoss(0.3), DPOLoss(0.3, label_smoothing=0.2), RobustDPOLoss(0.3, label_smoothing=0.2), HingeLoss(0.3),
    IPOLoss(0.3),
)  # fmt: skip


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def recorded_loss(inputs):
    options = {"beta": inputs["beta"]}
    if inputs["kind"] == "robust":
        options["label_smoothing"] = inputs["label_smoothing"]
    if inputs["kind"] == "sigmoid_norm":
        options["length_normalized"] = True
    return KINDS[inputs["kind"]](**options)


def ratios_of(loss, logprobs, ref, lengths):
    ratios = (logprobs - ref).sum(dim=1)
    return (ratios / lengths if loss.length_normalized else ratios).chunk(2)


def test_defaults_equal_those_of_trl():
    assert KTOLoss() == KTOLoss(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    assert RobustDPOLoss() == RobustDPOLoss(label_smoothing=0.1)


def test_case_worked_by_hand():
    # log-ratios differ by 3 and -2; beta 0.5 makes it 1.5 and -1
    chosen, rejected = float64([1, -1]), float64([-2, 1])
    # ln(1 + e^-1.5), ln(1 + e)
    assert_close(DPOLoss(0.5)(chosen, rejected), [0.2014133, 1.3132617])
    # 0.9 and 0.1 of the right way round and the other: ln(1 + e^1.5) = 1.7014133, ln(1 + e^-1) = 0.3132617
    assert_close(DPOLoss(0.5, label_smoothing=0.1)(chosen, rejected), [0.3514133, 1.2132617])
    # (0.9 * 0.2014133 - 0.1 * 1.7014133) / 0.8, (0.9 * 1.3132617 - 0.1 * 0.3132617) / 0.8
    assert_close(RobustDPOLoss(0.5, label_smoothing=0.1)(chosen, rejected), [0.0139133, 1.4382617], rtol=1e-5)
    # 1 - 1.5 < 0, 1 + 1
    assert_close(HingeLoss(0.5)(chosen, rejected), [0, 2])
    # (3 - 1)^2, (-2 - 1)^2
    assert_close(IPOLoss(0.5)(chosen, rejected), [4, 9])


def test_single_labels_worked_by_hand():
    # gains against a KL of 1: 2 - 1 = 1 for the first, 1 - (-1) = 2 for the second; beta 0.5
    # 2 (1 - sigmoid(0.5)) and 3 (1 - sigmoid(1))
    losses = KTOLoss(0.5, 2.0, 3.0)(float64([2, -1]), torch.tensor([True, False]), float64(1))
    assert_close(losses, [0.7550813, 0.8068243])
    assert_close(KTOLoss(0.5, 2.0, 3.0)(float64([1, 1]), torch.tensor([True, False]), float64(1)), [1, 1.5])


def test_regression_of_rewards_worked_by_hand():
    # eta 0.5: ((1 + 2) / 0.5 - 4)^2 = 2^2, ((-1 - 1) / 0.5 + 1)^2 = 3^2, and 0 where the policy implies the difference
    first, second, difference = float64([1, -1, 0.5]), float64([-2, 1, 0]), float64([4, -1, 1])
    assert_close(REBELLoss(0.5)(first, second, difference), [4, 9, 0])
    # gradient 2 (...) / eta: 8 and -8, -12 and 12
    first.requires_grad_(), second.requires_grad_()
    gradients = torch.autograd.grad(REBELLoss(0.5)(first, second, difference).sum(), [first, second])
    assert_close(gradients[0], [8, -12, 0])
    assert_close(gradients[1], [-8, 12, 0])
    assert REBELLoss() == REBELLoss(eta=1.0)


def test_regression_of_rewards_equals_that_of_the_authors():
    # Lines 774 to 777 of src/tldr/rebel.py in ZhaolinGao/REBEL with eta 0.5; their loss is eta^2 times the paper's
    first, second = float64([0.5, -1.0, 2.0]), float64([-0.25, 0.75, 2.0])
    difference = float64([1.0, 0.0, 0.3]) - float64([0.0, 1.0, -0.4])
    assert_close(0.25 * REBELLoss(0.5)(first, second, difference), [0.0625, 1.5625, 0.1225], rtol=1e-12)
    assert_close(0.25 * REBELLoss(0.5)(first, second, difference).mean(), 0.5825, rtol=1e-12)


@properties
@given(seeds)
def test_regression_of_rewards_equals_a_loop_and_ignores_a_common_offset(seed):
    first, second, rewards, others = (normal(5, seed=seed + i) for i in range(4))
    expected = [
        ((a - b) / 0.7 - (r - o)) ** 2
        for a, b, r, o in zip(first.tolist(), second.tolist(), rewards.tolist(), others.tolist(), strict=True)
    ]
    losses = REBELLoss(0.7)(first, second, rewards - others)
    assert_close(losses, expected, rtol=1e-9)
    assert_close(REBELLoss(0.7)(first + 3, second + 3, (rewards + 9) - (others + 9)), losses, rtol=1e-9)
    assert_close(REBELLoss(0.7)(second, first, others - rewards), losses, rtol=1e-9)
    assert float((REBELLoss(0.7)(second, first, rewards - others) - losses).abs().max()) > 1e-6  # a turned sign


@properties
@given(seeds)
def test_losses_equal_those_of_a_loop_from_the_papers(seed):
    chosen, rejected = (3 * normal(4, seed=seed + i) for i in range(2))
    beta, share = 0.3, 0.2
    formulas = (
        lambda d: -math.log(sigmoid(beta * d)),
        lambda d: -(1 - share) * math.log(sigmoid(beta * d)) - share * math.log(sigmoid(-beta * d)),
        lambda d: -((1 - share) * math.log(sigmoid(beta * d)) - share * math.log(sigmoid(-beta * d))) / (1 - 2 * share),
        lambda d: max(0.0, 1 - beta * d),
        lambda d: (d - 1 / (2 * beta)) ** 2,
    )
    for loss, formula in zip(EVERY, formulas, strict=True):
        expected = [formula(a - b) for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)]
        assert_close(loss(chosen, rejected), expected, rtol=1e-9)


@properties
@given(seeds)
def test_loss_of_single_labels_equals_that_of_a_loop_from_the_paper(seed):
    ratios, desirable = 3 * normal(6, seed=seed), normal(6, seed=seed + 1) > 0
    expected = []
    for ratio, good in zip(ratios.tolist(), desirable.tolist(), strict=True):
        value = 0.7 * sigmoid(0.3 * (ratio - 0.4)) if good else 1.6 * sigmoid(0.3 * (0.4 - ratio))
        expected.append((0.7 if good else 1.6) - value)
    assert_close(KTOLoss(0.3, 0.7, 1.6)(ratios, desirable, float64(0.4)), expected, rtol=1e-9)


@pytest.mark.parametrize("case", RECORDED["pairs"], ids=lambda case: case["inputs"]["kind"])
def test_losses_gradients_and_rewards_equal_those_of_trl(case):
    inputs, expected = case["inputs"], case["outputs"]
    loss, lengths = recorded_loss(inputs), torch.tensor(inputs["lengths"])
    logprobs, ref = float64(inputs["logprobs"]).requires_grad_(), float64(inputs["ref"])
    losses = loss(*ratios_of(loss, logprobs, ref, lengths))
    losses.mean().backward()
    assert_close(losses, expected["losses"], rtol=1e-6)  # TRL divides lengths in float32
    assert_close(losses.mean(), expected["mean"], rtol=1e-6)
    inside = torch.arange(logprobs.shape[1]) < lengths.unsqueeze(1)
    assert_close(logprobs.grad * inside, float64(expected["gradient"]) * inside, rtol=1e-6, atol=1e-9)
    for name, rewards in zip(("chosen", "rejected"), (loss.beta * (logprobs - ref).sum(1)).chunk(2), strict=True):
        assert_close(rewards.mean(), expected[f"rewards/{name}"], rtol=1e-6)
        assert_close(logprobs.sum(1).chunk(2)[name == "rejected"].mean(), expected[f"logps/{name}"], rtol=1e-6)


def test_every_kind_is_recorded_and_every_record_detects_a_wrong_sign():
    assert {case["inputs"]["kind"] for case in RECORDED["pairs"]} == set(KINDS)
    for case in RECORDED["pairs"]:
        loss, inputs = recorded_loss(case["inputs"]), case["inputs"]
        logprobs, ref = float64(inputs["logprobs"]), float64(inputs["ref"])
        turned = loss(*reversed(ratios_of(loss, logprobs, ref, torch.tensor(inputs["lengths"]))))
        assert float((turned - float64(case["outputs"]["losses"])).abs().max()) > 1e-2


@pytest.mark.parametrize("case", RECORDED["judgements"])
def test_loss_and_kl_of_single_labels_equal_those_of_trl(case):
    inputs, expected = case["inputs"], case["outputs"]
    logprobs, ref = float64(inputs["logprobs"]).requires_grad_(), float64(inputs["ref"])
    kl = (float64(inputs["mismatched"]) - float64(inputs["mismatched_ref"])).sum(dim=1).mean().clamp(min=0)
    assert_close(kl, expected["kl"])
    desirable, ratios = torch.tensor(inputs["labels"]).bool(), (logprobs - ref).sum(dim=1)
    losses = KTOLoss(inputs["beta"], *inputs["weights"])(ratios, desirable, kl)
    losses.mean().backward()
    assert_close(losses.mean(), expected["mean"], rtol=1e-6)
    assert_close(logprobs.grad, expected["gradient"], rtol=1e-6, atol=1e-9)
    turned = KTOLoss(inputs["beta"], *inputs["weights"])(-ratios, desirable, kl).mean()
    assert abs(float(turned.detach()) - expected["mean"]) > 1e-3
    for name, which in (("chosen", desirable), ("rejected", ~desirable)):
        if which.any():
            assert_close(inputs["beta"] * ratios[which].mean(), expected[f"rewards/{name}"], rtol=1e-6)


def test_negative_kl_and_labels_of_one_kind_are_recorded():
    assert any(case["outputs"]["kl"] == 0 for case in RECORDED["judgements"])
    assert any(case["outputs"]["kl"] > 0 for case in RECORDED["judgements"])
    assert {0, 5} < {sum(case["inputs"]["labels"]) for case in RECORDED["judgements"]}


@properties
@given(seeds)
def test_only_the_difference_of_log_ratios_counts(seed):
    chosen, rejected = (normal(4, seed=seed + i) for i in range(2))
    for loss in EVERY:
        assert_close(loss(chosen + 7, rejected + 7), loss(chosen, rejected), rtol=1e-6)


@properties
@given(seeds)
def test_gradients_raise_the_chosen_and_lower_the_rejected_equally(seed):
    chosen, rejected = (normal(4, seed=seed + i).requires_grad_() for i in range(2))
    for loss in EVERY[:1] + EVERY[2:4]:
        losses = loss(chosen, rejected)
        up, down = torch.autograd.grad(losses.sum(), [chosen, rejected])
        assert_close(up, -down)
        assert bool(((up < 0) | (losses == 0)).all())  # the hinge loss is 0 beyond its margin, which few pairs reach
        assert bool((up < 0).any())


def test_ipo_is_minimal_at_its_distance():
    loss, distance = IPOLoss(0.25), 2.0
    difference = float64([1, 2, 5]).requires_grad_()
    (slope,) = torch.autograd.grad(loss(difference, torch.zeros(3)).sum(), [difference])
    assert_close(slope, 2 * (difference - distance))


@properties
@given(seeds)
def test_robust_losses_average_to_that_of_correct_labels(seed):
    chosen, rejected = (normal(4, seed=seed + i) for i in range(2))
    robust = RobustDPOLoss(0.3, label_smoothing=0.2)
    mean = 0.8 * robust(chosen, rejected) + 0.2 * robust(rejected, chosen)
    assert_close(mean, DPOLoss(0.3)(chosen, rejected))


def test_without_smoothing_conservative_and_robust_are_dpo():
    chosen, rejected = (normal(9, seed=i) for i in range(2))
    assert_close(RobustDPOLoss(label_smoothing=0.0)(chosen, rejected), DPOLoss()(chosen, rejected))
    assert DPOLoss() == DPOLoss(beta=0.1, length_normalized=False, label_smoothing=0.0)
    assert IPOLoss() == IPOLoss(beta=0.1, length_normalized=True)


def test_huge_log_ratios_stay_finite():
    for loss in EVERY:
        chosen = float64([1e4, -1e4]).requires_grad_()
        losses = loss(chosen, torch.zeros(2))
        losses.sum().backward()
        assert bool(losses.isfinite().all())
        assert bool(chosen.grad.isfinite().all())
    ratios = float64([1e4, -1e4]).requires_grad_()
    KTOLoss()(ratios, torch.tensor([True, True]), float64(0)).sum().backward()
    assert bool(ratios.grad.isfinite().all())


@properties
@given(seeds)
def test_labels_raise_good_answers_and_lower_bad_ones_within_their_weights(seed):
    ratios, desirable = (3 * normal(6, seed=seed)).requires_grad_(), normal(6, seed=seed + 1) > 0
    losses = KTOLoss(0.3, 0.7, 1.6)(ratios, desirable, float64(0.4))
    (slope,) = torch.autograd.grad(losses.sum(), [ratios])
    assert bool(((slope < 0) == desirable).all())
    assert bool((losses > 0).all())
    assert bool((losses < torch.where(desirable, 0.7, 1.6)).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOLoss(0.0), "beta must be positive, got 0.0"),
        (lambda: DPOLoss(label_smoothing=0.5), r"label_smoothing must lie in \[0, 0.5\), got 0.5"),
        (lambda: RobustDPOLoss(label_smoothing=-0.1), r"label_smoothing must lie in \[0, 0.5\), got -0.1"),
        (lambda: REBELLoss(0.0), "eta must be positive, got 0.0"),
        (lambda: KTOLoss(desirable_weight=0.0), "desirable_weight must be positive, got 0.0"),
    ],
)
def test_invalid_numbers_are_rejected(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def test_best_and_the_worst_of_each_prompt_are_marked():
    # groups 0: rewards 1, 3, 2 - the second is best, the first worst; 1: all equal; 2: two best, the first is taken
    rewards = float64([[0, 1, 0], [3, 0, 0], [0, 0, 2], [1, 0, 0], [1, 0, 0], [5, 0, 0], [5, 0, 0], [0, 4, 0]])
    mask = torch.tensor([[True, True, False]] * 2 + [[True] * 3] + [[True, True, False]] * 5)
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    marks, same = BestAgainstWorst()(AdvantageInputs(rewards, mask, group))
    assert marks[:, 0].tolist() == [-1, 1, 0, 0, 0, 1, 0, -1]
    assert (marks != 0).equal(mask & (marks[:, :1] != 0))
    assert same.equal(marks)
    assert BestAgainstWorst().needs_groups


def test_excluded_response_is_neither_best_nor_worst():
    # the failed response of each prompt has the reward 0: the lowest of the first group, the highest of the second
    rewards = float64([[0.9], [0.5], [0.3], [0.0], [-0.2], [-0.7], [-0.4], [0.0]])
    mask = torch.tensor([[True], [True], [True], [False]] * 2)
    marks, _ = BestAgainstWorst()(AdvantageInputs(rewards, mask, torch.tensor([0] * 4 + [1] * 4)))
    assert marks[:, 0].tolist() == [1, 0, -1, 0, 1, -1, 0, 0]


# -- anchored losses, and losses without a reference ------------------------------------------------------------------


def test_anchored_losses_worked_by_hand():
    # beta 1: sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4, sigmoid(2 ln 3) = 9/10
    chosen, rejected = float64([math.log(3)]), float64([-math.log(3)])
    assert_close(APOZeroLoss(1.0)(chosen, rejected), [1 - 3 / 4 + 1 / 4])
    assert_close(APODownLoss(1.0)(chosen, rejected), [3 / 4 + 1 - 9 / 10])
    assert_close(APOZeroLoss(1.0)(rejected, chosen), [1 - 1 / 4 + 3 / 4])
    assert_close(APODownLoss(1.0)(rejected, chosen), [1 / 4 + 1 - 1 / 10])


def test_losses_without_reference_worked_by_hand():
    # SimPO: beta 2, margin 1: 2 (-0.5 + 1) - 1 = 0: ln 2.   ORPO: odds 1 and 1/3, log odds ratio ln 3: -ln(3/4)
    assert_close(SimPOLoss()(float64([-0.5]), float64([-1.0])), [math.log(2)])
    assert_close(SimPOLoss(2.0, margin=0.0)(float64([-0.5]), float64([-1.0])), [math.log(1 + math.exp(-1))])
    half, quarter = float64([0.5]).log(), float64([0.25]).log()
    assert_close(ORPOLoss(1.0)(half, quarter), [math.log(4 / 3)])
    assert_close(ORPOLoss(0.1)(quarter, half), [0.1 * math.log(4)])
    assert ORPOLoss()(float64([0.0]), float64([0.0])).isfinite()


@properties
@given(seeds)
def test_anchored_losses_and_those_without_reference_equal_loops_from_the_papers(seed):
    chosen, rejected = (3 * normal(4, seed=seed + i) for i in range(2))
    formulas = (
        (APOZeroLoss(0.3), lambda a, b: 1 - sigmoid(0.3 * a) + sigmoid(0.3 * b)),
        (APODownLoss(0.3), lambda a, b: sigmoid(0.3 * a) + 1 - sigmoid(0.3 * (a - b))),
        (SimPOLoss(1.5, margin=0.4), lambda a, b: -math.log(sigmoid(1.5 * (a - b) - 0.4))),
    )
    for loss, formula in formulas:
        expected = [formula(a, b) for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)]
        assert_close(loss(chosen, rejected), expected, rtol=1e-9)
        swapped = [formula(b, a) for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)]
        assert_close(loss(rejected, chosen), swapped, rtol=1e-9)
    good, bad = ((-each.abs() - 0.01).exp().tolist() for each in (chosen, rejected))
    expected = [
        -0.3 * math.log(sigmoid(math.log(a / (1 - a)) - math.log(b / (1 - b)))) for a, b in zip(good, bad, strict=True)
    ]
    assert_close(ORPOLoss(0.3)(-chosen.abs() - 0.01, -rejected.abs() - 0.01), expected, rtol=1e-8)


@pytest.mark.parametrize("number", range(4))
def test_anchored_losses_are_those_of_trl(number):
    case = golden("reference_free")["anchored"][number]
    kind = {"apo_zero": APOZeroLoss, "apo_down": APODownLoss}[case["kind"]]
    logprobs = float64(case["logprobs"]).requires_grad_()
    loss = kind(case["beta"])(*(logprobs - float64(case["ref"])).sum(dim=1).chunk(2)).mean()
    assert_close(loss, case["loss"], rtol=1e-5)
    inside = float64(case["logprobs"]) != 0  # not the padding
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(gradient[inside], float64(case["gradient"])[inside], rtol=1e-5)


@pytest.mark.parametrize("number", range(4))
def test_losses_without_reference_are_those_of_trl(number):
    case = golden("reference_free")["without_reference"][number]
    loss = SimPOLoss(case["beta"], margin=case["margin"]) if case["kind"] == "simpo" else ORPOLoss(case["beta"])
    chosen, rejected = (float64(case[name]).requires_grad_() for name in ("chosen", "rejected"))
    losses = loss(chosen, rejected)
    assert_close(losses, case["losses"], rtol=1e-5)
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert_close(gradients[0], case["chosen_gradient"], rtol=1e-4)
    assert_close(gradients[1], case["rejected_gradient"], rtol=1e-4)


def test_only_simpo_and_orpo_have_no_reference():
    every = (*EVERY, APOZeroLoss(), APODownLoss(), SimPOLoss(), ORPOLoss())
    assert [type(loss) for loss in every if not loss.uses_reference] == [SimPOLoss, ORPOLoss]
    assert all(loss.length_normalized for loss in every if not loss.uses_reference)


def test_invalid_margin_raises():
    with pytest.raises(ValueError, match="margin must be at least 0, got -1"):
        SimPOLoss(margin=-1)
