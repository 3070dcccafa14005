"""Cases worked by hand and figures of verl and TRL, for the losses that depend on a whole response."""

import math

import pytest
import torch
from hypothesis import given

from lightning_rlhf.extras.algorithms.sequence_policy_losses import (
    GMPOLoss,
    GSPOLoss,
    LUSPOLoss,
    OffPolicyMaskLoss,
    TOPRLoss,
    VESPOLoss,
)
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from tests.helpers import assert_close, float64, golden, masks, normal, properties, seeds
from tests.objectives.paper_loops import Case, bounded, clipped, of_mean_token, over_responses, ppo

LN2, LN3 = math.log(2), math.log(3)
RECORDED = golden("policy_losses")


def gspo(new, old, a, selected_tokens):
    ratio = math.prod(n.exp() / o.exp() for n, o in zip(new, old, strict=True)) ** (1 / len(new))
    return clipped(ratio, a[0], 0.05, 0.1)


def gmpo(new, old, a, selected_tokens):
    product = 1.0
    for n, o in zip(new, old, strict=True):
        ratio = n.exp() / o.exp()
        product = product * (bounded(ratio, 0, math.exp(0.4)) if a[0] > 0 else bounded(ratio, math.exp(-0.3), math.inf))
    return -a[0] * product ** (1 / len(new))


def vespo(new, old, a, selected_tokens):
    whole = math.prod((n.exp() / o.exp()).item() for n, o in zip(new, old, strict=True))
    k, decay = (2.0, 3.0) if a[0] >= 0 else (3.0, 2.0)
    return -(whole**k) * math.exp(decay * (1 - whole)) * a[0] * sum(new)


def topr(new, old, a, selected_tokens):
    whole = math.prod((n.exp() / o.exp()).item() for n, o in zip(new, old, strict=True))
    return -(1.0 if a[0] >= 0 else min(whole, 1.0)) * a[0] * sum(new)


def off_policy_mask(new, old, a, selected_tokens):
    gap = sum((o - n).item() for n, o in zip(new, old, strict=True)) / len(new)
    return 0 * sum(new) if a[0] < 0 and gap > 0.1 else of_mean_token(ppo)(new, old, a, selected_tokens)


CASES = {
    "gspo": Case(GSPOLoss(0.05, 0.1), SequenceMeanTokenMean(), over_responses(gspo), whole=True),
    "luspo": Case(
        LUSPOLoss(0.05, 0.1),
        SequenceMeanTokenSum(),
        over_responses(lambda new, *rest: len(new) * gspo(new, *rest)),
        whole=True,
    ),
    "gmpo": Case(GMPOLoss(0.3, 0.4), SequenceMeanTokenMean(), over_responses(gmpo), whole=True),
    "vespo": Case(VESPOLoss(), SequenceMeanTokenSum(), over_responses(vespo), whole=True),
    "topr": Case(TOPRLoss(), SequenceMeanTokenSum(), over_responses(topr), whole=True),
    "off_policy_mask": Case(
        OffPolicyMaskLoss(0.2, 0.1, 0.4, 1.5, threshold=0.1),
        SequenceMeanTokenMean(),
        over_responses(off_policy_mask),
        whole=True,
    ),
}


def call(objective, log_ratios, advantages, mask, aggregation):
    """Return token losses, gradient of the aggregated loss, and diagnostics, where all old log-probabilities are -1."""
    logprobs = (float64(log_ratios) - 1).requires_grad_()
    mask = torch.tensor(mask).bool()
    advantages = float64(advantages).unsqueeze(1).expand(mask.shape)
    losses, diagnostics = objective(logprobs, torch.full_like(advantages, -1), advantages, mask)
    loss = (losses * aggregation.weights(mask)).sum() / aggregation.denominator(mask)
    return losses, torch.autograd.grad(loss, logprobs)[0], diagnostics


def test_gspo_of_a_case_worked_by_hand():
    # Both responses have s = exp((ln 2 + ln 8) / 2) = 4; the third token of the second is from the environment.
    # A = -3: loss 12, gradient of the mean over responses: 1/2 * 1/2 * 12 = 3 on each of two tokens
    # A = 1: clipped at 1.5, loss -1.5, no gradient
    log_ratios = [[LN2, 3 * LN2, 0], [LN2, 3 * LN2, 7]]
    mask = [[1, 1, 0], [1, 1, 0]]
    objective = GSPOLoss(clip_range_low=0.2, clip_range_high=0.5)
    losses, gradient, diagnostics = call(objective, log_ratios, [-3, 1], mask, SequenceMeanTokenMean())
    assert_close(losses[:, :2], [[12, 12], [-1.5, -1.5]])
    assert_close(gradient, [[3, 3, 0], [0, 0, 0]])
    assert_close(diagnostics["clip_fraction"][:, :2], [[0, 0], [1, 1]])
    # k3 of the tokens, not of the response: 2 - 1 - ln 2 and 8 - 1 - 3 ln 2
    assert_close(diagnostics["approx_kl"][:, :2], [[1 - LN2, 7 - 3 * LN2]] * 2)
    # s = 1/4: A = -3 is clipped at 0.8, A = 1 is not
    log_ratios = [[-LN2, -3 * LN2, 0], [-LN2, -3 * LN2, 7]]
    losses, gradient, diagnostics = call(objective, log_ratios, [-3, 1], mask, SequenceMeanTokenMean())
    assert_close(losses[:, :2], [[2.4, 2.4], [-0.25, -0.25]])
    assert_close(gradient, [[0, 0, 0], [-0.0625, -0.0625, 0]])
    assert_close(diagnostics["clip_fraction"][:, :2], [[1, 1], [0, 0]])


def test_luspo_weights_a_response_by_its_length():
    # s = 2 for a response of three tokens and of one; |y| s = 6 and 2, the mean over responses (-6 - 2) / 2
    log_ratios, mask = [[LN2, LN2, LN2], [LN2, 5, 5]], [[1, 1, 1], [1, 0, 0]]
    objective = LUSPOLoss(clip_range_low=0.5, clip_range_high=2.0)
    losses, gradient, _ = call(objective, log_ratios, [1, 1], mask, SequenceMeanTokenSum())
    weights = SequenceMeanTokenSum().weights(torch.tensor(mask).bool())
    assert_close((losses * weights).sum() / 2, -4.0)
    assert_close(gradient, [[-1, -1, -1], [-1, 0, 0]])


@properties
@given(mask=masks(), seed=seeds)
def test_luspo_equals_gspo_except_for_aggregation_and_defaults(mask, seed):
    new, old, advantages = (normal(*mask.shape, seed=seed + i) for i in range(3))
    expected, actual = (loss(new, old, advantages, mask) for loss in (GSPOLoss(0.1, 0.2), LUSPOLoss(0.1, 0.2)))
    assert_close(actual[0], expected[0])


def test_gspo_takes_a_different_advantage_for_each_token():
    # GSPO-token, eq. 13: s = 2, and the loss of each token has its own A: -2 and 6; gradients the same
    logprobs = float64([[LN2 - 1, LN2 - 1]]).requires_grad_()
    objective = GSPOLoss(0.5, 2.0)
    losses, _ = objective(logprobs, float64([[-1, -1]]), float64([[1, -3]]), torch.ones(1, 2).bool())
    assert_close(losses, [[-2, 6]])
    assert_close(torch.autograd.grad(losses.sum(), logprobs)[0], [[-2, 6]])


def test_gmpo_of_a_case_worked_by_hand():
    # bounds ln 3 up and ln 2 down
    # A = 2, log-ratios ln 12 (clipped to ln 3) and -ln 12 (not): rho = exp((ln 3 - ln 12) / 2) = 1/2, loss -1,
    # gradient of the mean over two responses: the first token none, the second 1/2 * 1/2 * -1
    # A = -2, the same tokens: ln 12 (not), -ln 12 (clipped to -ln 2): rho = sqrt(6), loss 2 sqrt(6)
    ln12 = math.log(12)
    log_ratios, mask = [[ln12, -ln12, 9], [ln12, 9, -ln12]], [[1, 1, 0], [1, 0, 1]]
    objective = GMPOLoss(clip_range_low=LN2, clip_range_high=LN3)
    losses, gradient, diagnostics = call(objective, log_ratios, [2, -2], mask, SequenceMeanTokenMean())
    root = math.sqrt(6)
    assert_close(losses, [[-1] * 3, [2 * root] * 3])
    assert_close(gradient, [[0, -0.25, 0], [root / 2, 0, 0]])
    assert_close(diagnostics["clip_fraction"], [[1, 0, 0], [0, 0, 1]])


def test_gmpo_bounds_a_token_of_advantage_0_only_from_below():
    # 3 ln 2 stays and -3 ln 2 becomes -ln 2: rho = exp((3 - 1 + 1) ln 2 / 3) = 2, mean A = 1/3
    losses, _ = GMPOLoss(LN2, LN2)(
        float64([[3 * LN2, -3 * LN2, 3 * LN2]]) - 1,
        torch.full((1, 3), -1.0),
        float64([[0, 0, 1]]),
        torch.ones(1, 3) > 0,
    )
    assert_close(losses, [[-2 / 3] * 3])


def test_gmpo_uses_the_mean_of_different_advantages_in_a_response():
    # mean A = 1 over two tokens, rho = exp((ln 2 + 0) / 2)
    losses, _ = GMPOLoss(9.0, 9.0)(
        float64([[LN2 - 1, -1, 0]]), float64([[-1, -1, 0]]), float64([[3, -1, 50]]), torch.tensor([[True, True, False]])
    )
    assert_close(losses, [[-math.sqrt(2)] * 3])


def test_vespo_of_a_case_worked_by_hand():
    # W = 2 * 3/2 = 3. A = 2: phi = 3^2 e^(3 (1 - 3)) = 9 e^-6; A = -2: 3^3 e^(2 (1 - 3)) = 27 e^-4;
    # A = 0 counts as positive. logprobs ln 2 - 1 and ln 1.5 - 1
    log_ratios, mask = [[LN2, 9, LN3 - LN2]] * 3, [[1, 0, 1]] * 3
    losses, gradient, diagnostics = call(VESPOLoss(), log_ratios, [2, -2, 0], mask, SequenceMeanTokenSum())
    phi = float64([9 * math.exp(-6), 27 * math.exp(-4), 9 * math.exp(-6)]).unsqueeze(1)
    expected = -phi * float64([[2], [-2], [0]])
    assert_close(losses[:, [0, 2]], expected * float64([[LN2 - 1, LN3 - LN2 - 1]]))
    assert_close(gradient, expected * float64([[1, 0, 1]]) / 3)
    assert_close(diagnostics["sequence_weight"][:, [0, 2]], phi.expand(3, 2))
    objective = VESPOLoss(k_pos=1.0, lambda_pos=2.0, k_neg=4.0, lambda_neg=0.5)
    weight = call(objective, log_ratios, [1, -1, 0], mask, SequenceMeanTokenSum())[2]["sequence_weight"]
    assert_close(weight[:2, 0], [3 * math.exp(-4), 81 * math.exp(-1)])


@pytest.mark.parametrize(("old", "expected"), [(10.0, -2 + 1e-9), (-10.0, 2 + 1e-9 * (1 - math.exp(20)))])
def test_vespo_limits_the_distance_of_a_response_to_20_nats(old, expected):
    weight = VESPOLoss(k_pos=0.1, lambda_pos=1e-9)(
        torch.zeros(1, 4), torch.full((1, 4), old), torch.ones(1, 4), torch.ones(1, 4).bool()
    )[1]["sequence_weight"]
    assert_close(weight, [[math.exp(expected)] * 4], rtol=1e-6)  # 40 nats would be e^-4, and 0


def test_topr_of_a_case_worked_by_hand():
    # W = 2 * 3/2 = 3 and 1/2 * 2/3 = 1/3. A = 2 and 0 have the weight 1 for any W; A = -2 has min(3, 1) and 1/3.
    # Losses -w A logprob with logprobs ln 2 - 1 and ln 1.5 - 1, or -ln 2 - 1 and -ln 1.5 - 1
    more, less = [LN2, 9, LN3 - LN2], [-LN2, 9, LN2 - LN3]
    log_ratios, mask = [more, less, more, less, less], [[1, 0, 1]] * 5
    losses, gradient, diagnostics = call(TOPRLoss(), log_ratios, [2, 2, -2, -2, 0], mask, SequenceMeanTokenSum())
    weight = float64([1, 1, 1, 1 / 3, 1]).unsqueeze(1)
    slope = weight * float64([[-2], [-2], [2], [2], [0]])
    assert_close(losses[:, [0, 2]], slope * (float64(log_ratios)[:, [0, 2]] - 1))
    assert_close(gradient, slope * float64([[1, 0, 1]]) / 5)
    assert_close(diagnostics["sequence_weight"][:, [0, 2]], weight.expand(5, 2))


def test_topr_equals_that_of_trinity_rft():
    # TOPRPolicyLossFn of modelscope/Trinity-RFT (November 2026), which truncates the ratio of each number that it gets,
    # called with each response's summed log-probabilities: loss and gradient of the mean over responses.
    logprobs = float64([[-0.5, -1.25, -0.75], [-2.0, -0.25, -9.0], [-0.5, -0.125, -1.5]]).requires_grad_()
    old = float64([[-1.0, -1.0, -1.5], [-0.75, -1.0, -9.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    advantages = float64([2.0, -3.0, -0.5]).unsqueeze(1).expand(3, 3)
    losses, diagnostics = TOPRLoss()(logprobs, old, advantages, mask)
    loss = losses.masked_fill(~mask, 0).sum() / 3
    assert_close(loss, -0.05219398435342507, rtol=1e-12)
    assert_close(diagnostics["sequence_weight"][:, 0].mean(), 0.8688435532375444, rtol=1e-12)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    weight = 0.8688435532375444 * 3 - 2  # of the second response: the other two have 1
    assert_close(gradient, [[-2 / 3] * 3, [weight, weight, 0], [0.5 / 3] * 3], rtol=1e-12)


@pytest.mark.parametrize("old", [-10.0, 10.0])
def test_topr_of_a_response_far_from_the_old_policy(old):
    logprobs = torch.zeros(2, 4, requires_grad=True)
    losses, diagnostics = TOPRLoss()(
        logprobs, torch.full((2, 4), old), torch.tensor([[1.0] * 4, [-1.0] * 4]), torch.ones(2, 4).bool()
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    negative = 1.0 if old < 0 else math.exp(-40)
    assert_close(diagnostics["sequence_weight"][:, 0], [1.0, negative], rtol=1e-6)
    assert_close(gradient[:, 0], [-1.0, negative], rtol=1e-6)


@pytest.mark.parametrize("objective", [GSPOLoss(0.1, 0.2), LUSPOLoss(0.1, 0.2), GMPOLoss()])
@properties
@given(mask=masks(), seed=seeds)
def test_every_policy_token_of_a_response_has_the_same_loss(objective, mask, seed):
    new, old = (normal(*mask.shape, seed=seed + i) for i in range(2))
    advantages = normal(len(mask), 1, seed=seed + 2).expand(mask.shape)
    losses, _ = objective(new, old, advantages, mask)
    for row, counts in zip(losses, mask, strict=True):
        assert_close(row[counts], row[counts][:1].expand(int(counts.sum())))


PEERS = {
    ("verl", "gspo"): (GSPOLoss(0.05, 0.15), SequenceMeanTokenMean()),
    ("verl", "gspo_token_mean"): (GSPOLoss(0.3, 0.4), TokenMean()),
    ("verl", "geo_mean"): (GMPOLoss(0.3, 0.4), SequenceMeanTokenMean()),
    ("trl", "gspo"): (GSPOLoss(0.05, 0.15), SequenceMeanTokenMean()),
    ("trl", "luspo"): (LUSPOLoss(0.05, 0.15), SequenceMeanTokenSum()),
    ("trl", "gmpo"): (GMPOLoss(0.3, 0.4), SequenceMeanTokenMean()),
    ("trl", "vespo"): (VESPOLoss(2.0, 3.0, 3.0, 2.0), TokenMean()),
}


@pytest.mark.parametrize(("package", "name"), PEERS)
def test_loss_gradient_and_clip_fractions_are_those_of_peers(package, name):
    objective, aggregation = PEERS[package, name]
    inputs, expected = RECORDED["inputs"], RECORDED[package]["outputs"][name]
    mask = float64(inputs["mask"]).bool()
    advantages = float64(inputs["response_advantages"]).unsqueeze(1).expand(mask.shape)
    logprobs = float64(inputs["logprobs"]).requires_grad_()
    losses, diagnostics = objective(logprobs, float64(inputs["old_logprobs"]), advantages, mask)
    loss = (losses * aggregation.weights(mask)).sum() / aggregation.denominator(mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_close(loss, expected["loss"], rtol=3e-8, atol=0)  # verl adds 1e-8 to lengths, GMPO twice
    assert_close(gradient, expected["gradient"], rtol=3e-8, atol=1e-12)
    theirs = expected["metrics"]
    if name in ("gspo", "gspo_token_mean") and package == "verl":
        assert_close(diagnostics["clip_fraction"][mask].mean(), theirs["actor/pg_clipfrac"], rtol=1e-8)
    if name in ("gspo", "luspo") and package == "trl":  # TRL counts responses
        assert_close(diagnostics["clip_fraction"][:, 0].mean(), theirs["clip_ratio/region_mean"])
    if name == "gmpo":
        assert_close(diagnostics["clip_fraction"][mask].mean(), theirs["clip_ratio/region_mean"], rtol=1e-7)
    if name == "vespo":
        assert_close(diagnostics["sequence_weight"][:, 0].mean(), theirs["vespo/phi_seq_mean"])


def test_defaults_equal_those_of_the_papers():
    assert GSPOLoss() == GSPOLoss(3e-4, 4e-4)
    assert LUSPOLoss() == LUSPOLoss(2e-3, 2.5e-3)
    assert GMPOLoss() == GMPOLoss(0.4, 0.4)
    assert VESPOLoss() == VESPOLoss(2.0, 3.0, 3.0, 2.0)


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (GSPOLoss, {"clip_range_low": 0.0}, r"^clip_range_low must lie in \(0, 1\], got 0.0$"),
        (GSPOLoss, {"clip_range_low": 1.1}, r"^clip_range_low must lie in \(0, 1\], got 1.1$"),
        (LUSPOLoss, {"clip_range_high": 0.0}, r"^clip_range_high must be positive, got 0.0$"),
        (GMPOLoss, {"clip_range_low": 0.0}, r"^clip_range_low must be positive, got 0.0$"),
        (GMPOLoss, {"clip_range_high": -1.0}, r"^clip_range_high must be positive, got -1.0$"),
        (VESPOLoss, {"k_pos": 0.0}, r"^k_pos must be positive, got 0.0$"),
        (VESPOLoss, {"lambda_pos": 0.0}, r"^lambda_pos must be positive, got 0.0$"),
        (VESPOLoss, {"k_neg": 0.0}, r"^k_neg must be positive, got 0.0$"),
        (VESPOLoss, {"lambda_neg": 0.0}, r"^lambda_neg must be positive, got 0.0$"),
    ],
)
def test_invalid_hyper_parameters_are_rejected(objective, arguments, message):
    with pytest.raises(ValueError, match=message):
        objective(**arguments)


def test_bounds_at_the_edge_of_their_ranges_are_allowed():
    GSPOLoss(clip_range_low=1.0, clip_range_high=1e-6)
    GMPOLoss(clip_range_low=5.0, clip_range_high=1e-6)


def test_off_policy_mask_of_a_case_worked_by_hand():
    # log(rollout / current): mean (1.2 + 0.0) / 2 = 0.6 in the first two, 0.3 in the third and fourth; threshold 0.5.
    # Only the first has a negative advantage and a mean above it. Current equals old, so that the others' loss is -A.
    logprobs = torch.full((4, 2), -1.0, dtype=torch.float64).requires_grad_()
    mask, advantages = torch.ones(4, 2, dtype=torch.bool), float64([[-2, -2], [2, 2], [-2, -2], [2, 2]])
    rollout = float64([[0.2, -1.0], [0.2, -1.0], [-0.4, -1.0], [-0.4, -1.0]])
    losses, diagnostics = OffPolicyMaskLoss(threshold=0.5)(
        logprobs, torch.full_like(rollout, -1), advantages, mask, rollout_logprobs=rollout
    )
    assert_close(losses, [[0, 0], [-2, -2], [2, 2], [-2, -2]])
    assert_close(diagnostics["off_policy_fraction"], [[1, 1], [0, 0], [0, 0], [0, 0]])
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert_close(gradient, [[0, 0], [-2, -2], [2, 2], [-2, -2]])


@pytest.mark.parametrize("number", range(4))
def test_off_policy_mask_is_that_of_trl(number):
    case = golden("policy_masks")["off_policy"][number]
    logprobs, rollout, advantages = (float64(case[name]) for name in ("logprobs", "rollout_logprobs", "advantages"))
    mask = float64(case["mask"]).bool()
    _, diagnostics = OffPolicyMaskLoss(threshold=case["threshold"])(
        logprobs, logprobs, advantages.expand(mask.shape), mask, rollout_logprobs=rollout
    )
    left_out = ~float64(case["keep"]).bool().expand(mask.shape)
    assert torch.equal((diagnostics["off_policy_fraction"] == 1) & mask, left_out & mask)


def test_invalid_threshold_of_the_off_policy_mask_raises():
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        OffPolicyMaskLoss(threshold=0)
