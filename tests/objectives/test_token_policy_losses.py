"""Cases worked by hand and figures of verl and TRL, for the losses of single tokens."""

import math

import pytest
import torch

from lightning_rlhf.extras.algorithms.policy_losses import (
    DPPOBernoulliKLLoss,
    DPPOTotalVariationLoss,
    DROLoss,
    SAPOLoss,
)
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from lightning_rlhf.objectives.base import PolicyTokens
from lightning_rlhf.objectives.policy_losses import CISPOLoss, ClippedPolicyLoss, ReinforceLoss
from tests.helpers import assert_close, float64, golden
from tests.objectives.paper_loops import Case, bounded, of_mean_token, over_responses, over_tokens, ppo

LN2, LN3 = math.log(2), math.log(3)
RECORDED = golden("policy_losses")


def cispo(new, old, a, selected_tokens):
    return -bounded((new.exp() / old.exp()).detach(), 1 - 0.3, 1 + 0.5) * a * new


def sapo(new, old, a, selected_tokens):
    tau = 1.1 if a > 0 else 1.6
    return -a * (4 / tau) / (1 + (-tau * (new.exp() / old.exp() - 1)).exp())


def dppo(diverged, low, high, cap):
    def of_token(new, old, a, selected_tokens):
        p, q = math.exp(new.item()), math.exp(old)
        leaves = p > q and diverged(p, q) > high if a > 0 else p < q and diverged(p, q) > low
        return 0 * new if leaves else -a * min(p / q, cap) * new

    return of_token


def bernoulli_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


CASES = {
    "ppo": Case(ClippedPolicyLoss(0.2, 0.1, 0.4, 1.5), TokenMean(), over_tokens(ppo)),
    "reinforce": Case(ReinforceLoss(), TokenMean(), over_tokens(lambda new, old, a, selected_tokens: -a * new)),
    "cispo": Case(CISPOLoss(0.3, 0.5), TokenMean(), over_tokens(cispo)),
    "sapo": Case(SAPOLoss(1.1, 1.6), SequenceMeanTokenMean(), over_responses(of_mean_token(sapo))),
    "dro": Case(
        DROLoss(0.7),
        TokenMean(),
        over_tokens(lambda new, old, a, selected_tokens: -(new * a - 0.7 / 2 * (new - old) ** 2)),
    ),
    "dppo_tv": Case(
        DPPOTotalVariationLoss(0.05, 0.1, 1.3), TokenMean(), over_tokens(dppo(lambda p, q: abs(p - q), 0.05, 0.1, 1.3))
    ),
    "dppo_kl": Case(
        DPPOBernoulliKLLoss(0.01, 0.03, 1.3), TokenMean(), over_tokens(dppo(bernoulli_kl, 0.01, 0.03, 1.3))
    ),
}


def call(objective, logprobs, old_logprobs, advantages):
    """Return loss, gradient of its sum, and diagnostics of some tokens."""
    leaf = float64(logprobs).requires_grad_()
    rows = [torch.atleast_2d(tensor) for tensor in (leaf, float64(old_logprobs), float64(advantages))]
    loss, diagnostics = objective(*rows, torch.ones_like(rows[0]).bool())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.reshape(leaf.shape), gradient, {name: value.reshape(leaf.shape) for name, value in diagnostics.items()}


def test_reinforce_of_a_case_worked_by_hand():
    # -2 (-1) = 2 and 3 (-2) = -6; the old policy only shows in the diagnostics: log-ratios ln 2 and 0
    loss, gradient, diagnostics = call(ReinforceLoss(), [[-1, -2]], [[-1 - LN2, -2]], [[2, -3]])
    assert_close(loss, [[2, -6]])
    assert_close(gradient, [[-2, 3]])
    assert diagnostics.keys() == {"approx_kl"}
    assert_close(diagnostics["approx_kl"], [[1 - LN2, 0]])


def test_cispo_of_a_case_worked_by_hand():
    # ratios 2, 2, 1/2, 1/2; weights within [0.6, 1.5]: 1.5, 1.5, 0.6, 0.6; logprob -1: loss = weight A
    objective = CISPOLoss(clip_range_low=0.4, clip_range_high=0.5)
    old = [-1 - LN2, -1 - LN2, -1 + LN2, -1 + LN2]
    loss, gradient, diagnostics = call(objective, [-1, -1, -1, -1], old, [1, -2, 1, -2])
    assert_close(loss, [1.5, -3, 0.6, -1.2])
    assert_close(gradient, [-1.5, 3, -0.6, 1.2])
    assert_close(diagnostics["clip_fraction"], [1, 1, 1, 1])
    # without a lower bound 1/2 stays, and the default upper bound lets 2 and 5 be, and cuts 6
    old = [-1 - LN2, -1 + LN2, -1 - math.log(4.99), -1 - math.log(6)]
    loss, _, diagnostics = call(CISPOLoss(), [-1, -1, -1, -1], old, [1, 1, 1, 1])
    assert_close(loss, [2, 0.5, 4.99, 5])
    assert_close(diagnostics["clip_fraction"], [0, 0, 0, 1])


def test_sapo_of_a_case_worked_by_hand():
    # A = 3, tau = 2, r = 1: sigmoid(0) = 1/2, loss -3 (4/2) / 2 = -3; the gate is open, gradient -A
    # A = -3, tau = 4, r = 1: 3 (4/4) / 2 = 1.5, gradient -A = 3
    # A = 3, tau = 2, r = 2: p = 1 / (1 + e^-2) = 0.8807971, loss -6 p = -5.2847825; gate 4 p (1 - p) = 0.4199743,
    # gradient -3 * 2 * gate = -2.5198460
    # A = 0 takes tau_neg: the gate at r = 2 is 4 p (1 - p), p = 1 / (1 + e^-4) = 0.9820138: 0.0706508
    loss, gradient, diagnostics = call(
        SAPOLoss(tau_pos=2, tau_neg=4), [-1, -1, -1, -1], [-1, -1, -1 - LN2, -1 - LN2], [3, -3, 3, 0]
    )
    assert_close(loss, [-3, 1.5, -5.2847825, 0], rtol=1e-7)
    assert_close(gradient, [-3, 3, -2.5198460, 0], rtol=1e-7)
    assert_close(diagnostics["gate"], [1, 1, 0.4199743, 0.0706508], rtol=1e-6)


def test_dro_of_a_case_worked_by_hand():
    # A = 2, logprob -1, log-ratio 3, beta 1/2: 2 + 1/4 * 9 = 4.25; gradient -2 + 1/2 * 3 = -0.5
    # the same with log-ratio -3: gradient -2 - 1.5 = -3.5
    loss, gradient, _ = call(DROLoss(beta=0.5), [-1, -1], [-4, 2], [2, 2])
    assert_close(loss, [4.25, 4.25])
    assert_close(gradient, [-0.5, -3.5])


def test_dro_limits_its_gradient_to_that_at_20_nats():
    # 20 * 50 - 200 = 800, gradient 20 with the sign of the log-ratio
    loss, gradient, _ = call(DROLoss(beta=1.0), [-60, -10, -21], [-10, -60, -1], [0, 0, 0])
    assert_close(loss, [800, 800, 200])
    assert_close(gradient, [-20, 20, -20])


def test_log_probabilities_are_clamped_at_10000_and_0_outside_the_mask():
    values = float64([[-2e4, 2e4, -3, torch.nan]])
    tokens = PolicyTokens.of(values, -values, values, torch.tensor([[True, True, True, False]]))
    assert tokens.logprobs.tolist() == [[-1e4, 1e4, -3, 0]]
    assert tokens.old_logprobs.tolist() == [[1e4, -1e4, 3, 0]]
    assert tokens.advantages.tolist() == [[-2e4, 2e4, -3, 0]]


def test_dppo_by_total_variation_of_a_case_worked_by_hand():
    # from 0.4 to 0.5, 0.6 and 0.3, 0.2; bounds 0.15 up and 0.1 + down
    # A = 1:  up by 0.1 stays, up by 0.2 is dropped, down stays however far
    # A = -1: up stays however far, down by 0.1 stays, down by 0.2 is dropped
    new = float64([0.5, 0.6, 0.3, 0.2]).log()
    old = float64([0.4] * 4).log()
    objective = DPPOTotalVariationLoss(divergence_low=0.11, divergence_high=0.15, ratio_cap=1.4)
    loss, gradient, diagnostics = call(objective, [new.tolist()] * 2, [old.tolist()] * 2, [[1] * 4, [-1] * 4])
    # ratios 1.25, 1.5 (capped: 1.4), 0.75, 0.5
    weight = float64([[1.25, 0, 0.75, 0.5], [-1.25, -1.4, -0.75, 0]])
    assert_close(gradient, -weight)
    assert_close(loss, -weight * new)
    assert_close(diagnostics["dropped_fraction"], [[0, 1, 0, 0], [0, 0, 0, 1]])
    assert_close(diagnostics["capped_fraction"], [[0, 0, 0, 0], [0, 1, 0, 0]])


def test_dppo_keeps_a_token_at_a_bound_and_the_ratio_at_its_cap():
    class Fixed(DPPOTotalVariationLoss):
        def divergence(self, logprobs, old_logprobs):
            return torch.full_like(logprobs, 0.25)

    for at, (low, high) in enumerate([(0.25, 0.1), (0.1, 0.25)]):
        dropped = call(Fixed(low, high), [-3, -1], [-2, -2], [-1, 1])[2]["dropped_fraction"]
        assert dropped.tolist() == [at, 1 - at]
    # An advantage of 0 is dropped where it fell; a ratio of 1 is not above a cap of 1.
    assert call(Fixed(0.1, 0.1), [-3, -1], [-2, -2], [0, 0])[2]["dropped_fraction"].tolist() == [1, 0]
    assert call(Fixed(9.0, 9.0, 1.0), [-2, -1], [-2, -2], [1, 1])[2]["capped_fraction"].tolist() == [0, 1]


def test_dppo_by_bernoulli_kl_of_a_case_worked_by_hand():
    # from 1/2 to 3/4: (ln(2/3) + ln 2) / 2 = ln(4/3) / 2 = 0.1438410; to 1/4 the same by symmetry
    half, quarter = math.log(0.5), math.log(0.25)
    new = [quarter + LN3, quarter]
    assert_close(DPPOBernoulliKLLoss().divergence(float64(new), float64([half, half])), [math.log(4 / 3) / 2] * 2)
    for bound, dropped in ((0.1438, 1), (0.1439, 0)):
        up = DPPOBernoulliKLLoss(divergence_low=9, divergence_high=bound)
        down = DPPOBernoulliKLLoss(divergence_low=bound, divergence_high=9)
        assert_close(call(up, new, [half, half], [1, 1])[2]["dropped_fraction"], [dropped, 0])
        assert_close(call(down, new, [half, half], [-1, -1])[2]["dropped_fraction"], [0, dropped])
        assert_close(call(up, new, [half, half], [-1, -1])[2]["dropped_fraction"], [0, 0])
        assert_close(call(down, new, [half, half], [1, 1])[2]["dropped_fraction"], [0, 0])
    # from 0.9 to 0.5 it is 0.9 ln 1.8 + 0.1 ln 0.2 = 0.3680642, unlike the other direction with 0.5108256
    assert_close(DPPOBernoulliKLLoss().divergence(float64([half]), float64([0.9]).log()), [0.3680642], rtol=1e-6)


def test_certain_token_has_a_finite_divergence():
    certain, likely = float64([0.0]), float64([-1e-12])
    for new, old in ((certain, certain), (certain, likely), (likely, certain)):
        assert_close(DPPOBernoulliKLLoss().divergence(new, old), [0.0], atol=1e-9)
    # from 1/4 to 1: ln(1/4) / 4 + 3/4 ln(3/4 / 1e-8)
    expected = math.log(0.25) / 4 + 0.75 * math.log(0.75e8)
    assert_close(DPPOBernoulliKLLoss().divergence(certain, float64([0.25]).log()), [expected], rtol=1e-12)


PEERS = {
    ("verl", "vanilla"): (ClippedPolicyLoss(0.2, 0.1, 0.4, 1.5), SequenceMeanTokenSum()),
    ("verl", "gpg"): (ReinforceLoss(), TokenMean()),
    ("verl", "cispo"): (CISPOLoss(0.3, 0.4), TokenMean()),
    ("verl", "cispo_unbounded"): (CISPOLoss(None, 0.2), TokenMean()),
    ("verl", "sapo"): (SAPOLoss(1.0, 1.4), SequenceMeanTokenMean()),
    ("verl", "dro"): (DROLoss(0.7), TokenMean()),
    ("verl", "dppo_tv"): (DPPOTotalVariationLoss(0.05, 0.1, 1.3), TokenMean()),
    ("verl", "dppo_kl"): (DPPOBernoulliKLLoss(0.02, 0.01, 1.3), TokenMean()),
    ("trl", "cispo"): (CISPOLoss(None, 0.4), TokenMean()),
    ("trl", "sapo"): (SAPOLoss(1.0, 1.4), SequenceMeanTokenMean()),
}


@pytest.mark.parametrize(("package", "name"), PEERS)
def test_loss_and_gradient_are_those_of_peers(package, name):
    objective, aggregation = PEERS[package, name]
    inputs, expected = RECORDED["inputs"], RECORDED[package]["outputs"][name]
    mask = float64(inputs["mask"]).bool()
    advantages = float64(inputs[expected.get("advantages", "response_advantages")])
    logprobs = float64(inputs["logprobs"]).requires_grad_()
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(mask.shape)
    losses, diagnostics = objective(logprobs, float64(inputs["old_logprobs"]), advantages, mask)
    loss = (losses * aggregation.weights(mask)).sum() / aggregation.denominator(mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(loss, expected["loss"], rtol=1e-8, atol=0)  # verl adds 1e-8 to the length of a response
    assert_close(gradient, expected["gradient"], rtol=1e-8, atol=1e-12)
    theirs = expected["metrics"]
    for ours, key in (
        ("clip_fraction", "actor/pg_clipfrac"),
        ("dropped_fraction", "actor/pg_clipfrac"),
        ("dual_clip_fraction", "actor/pg_clipfrac_lower"),
        ("capped_fraction", "actor/pg_clipfrac_lower"),
    ):
        if ours in diagnostics and key in theirs:
            assert 0 < theirs[key] < 1
            assert_close(diagnostics[ours][mask].mean(), theirs[key], rtol=1e-8)


def test_defaults_equal_those_of_the_papers():
    assert CISPOLoss() == CISPOLoss(None, 4.0)
    assert SAPOLoss() == SAPOLoss(1.0, 1.05)
    assert DPPOTotalVariationLoss() == DPPOTotalVariationLoss(0.15, 0.15, 20.0)
    assert DPPOBernoulliKLLoss() == DPPOBernoulliKLLoss(0.05, 0.05, 20.0)


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (CISPOLoss, {"clip_range_low": 0.0}, r"^clip_range_low must lie in \(0, 1\] or null, got 0.0$"),
        (CISPOLoss, {"clip_range_low": 1.1}, r"^clip_range_low must lie in \(0, 1\] or null, got 1.1$"),
        (CISPOLoss, {"clip_range_high": 0.0}, r"^clip_range_high must be positive, got 0.0$"),
        (SAPOLoss, {"tau_pos": 0.0}, r"^tau_pos must be positive, got 0.0$"),
        (SAPOLoss, {"tau_neg": -1.0}, r"^tau_neg must be positive, got -1.0$"),
        (DROLoss, {"beta": 0.0}, r"^beta must be positive, got 0.0$"),
        (DPPOTotalVariationLoss, {"divergence_low": 0.0}, r"^divergence_low must be positive, got 0.0$"),
        (DPPOBernoulliKLLoss, {"divergence_high": 0.0}, r"^divergence_high must be positive, got 0.0$"),
        (DPPOBernoulliKLLoss, {"ratio_cap": 0.9}, r"^ratio_cap must be at least 1, got 0.9$"),
    ],
)
def test_invalid_hyper_parameters_are_rejected(objective, arguments, message):
    with pytest.raises(ValueError, match=message):
        objective(**arguments)


def test_hyper_parameters_at_the_edge_of_their_ranges_are_allowed():
    CISPOLoss(clip_range_low=1.0, clip_range_high=1e-3)
    DPPOTotalVariationLoss(ratio_cap=1.0)


def test_ratios_are_exact_up_to_20_nats_and_clamped_beyond():
    old = [-30.0, -30.0]
    loss, gradient, _ = call(DPPOTotalVariationLoss(ratio_cap=1e12), [-10.5, -9.5], old, [-1, -1])
    assert_close(gradient, [math.exp(19.5), math.exp(20)])
    assert_close(loss, [-10.5 * math.exp(19.5), -9.5 * math.exp(20)])
