import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

objectives = st.builds(
    ClippedPolicyLoss,
    clip_range=st.sampled_from([0.1, 0.2, 0.5]),
    clip_range_low=st.sampled_from([None, 0.05, 1.0]),
    clip_range_high=st.sampled_from([None, 0.28, 3.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)


def _call(objective, logprobs, old_logprobs, advantages, mask=None):
    """Return losses and diagnostics of tokens in any form, as of one response if they are not those of several."""
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    shape = logprobs.shape
    rows = shape if len(shape) == 2 else (1, -1)
    loss, diagnostics = objective(*(tensor.reshape(rows) for tensor in (logprobs, old_logprobs, advantages, mask)))
    return loss.reshape(shape), {name: value.reshape(shape) for name, value in diagnostics.items()}


def _bounds(objective):
    low = objective.clip_range if objective.clip_range_low is None else objective.clip_range_low
    high = objective.clip_range if objective.clip_range_high is None else objective.clip_range_high
    return 1 - low, 1 + high


def test_loss_of_a_case_worked_by_hand():
    # ratio     1/2    1     2
    # A = 1     -1/2   -1    -1.2    the gain is capped above: clip(2) = 1.2
    # A = -1    0.8    1     2       the loss is capped below: clip(1/2) = 0.8
    ratios = float64([[0.5, 1, 2], [0.5, 1, 2]])
    advantages = float64([[1, 1, 1], [-1, -1, -1]])
    objective = ClippedPolicyLoss(clip_range=0.2)
    loss, diagnostics = _call(objective, ratios.log() - 3, torch.full_like(ratios, -3), advantages)
    assert_close(loss, [[-0.5, -1, -1.2], [0.8, 1, 2]])
    assert_close(diagnostics["clip_fraction"], [[0, 0, 1], [1, 0, 0]])
    assert_close(diagnostics["dual_clip_fraction"], torch.zeros(2, 3))
    # r - 1 - ln r
    assert_close(diagnostics["approx_kl"], [[0.1931472, 0, 0.3068528]] * 2, rtol=1e-6)


def test_separate_bounds_and_dual_clip_of_a_case_worked_by_hand():
    # bounds [0.9, 1.4]; where A = -2, no loss above 2 * 1.5 = 3
    ratios = float64([0.5, 0.5, 1.3, 1.3, 2, 2])
    advantages = float64([2, -2, 2, -2, 2, -2])
    objective = ClippedPolicyLoss(clip_range=0.2, clip_range_low=0.1, clip_range_high=0.4, dual_clip=1.5)
    loss, diagnostics = _call(objective, ratios.log(), torch.zeros(6), advantages)
    assert_close(loss, [-1, 1.8, -2.6, 2.6, -2.8, 3])
    assert_close(diagnostics["clip_fraction"], [0, 1, 0, 0, 1, 0])
    assert_close(diagnostics["dual_clip_fraction"], [0, 0, 0, 0, 0, 1])


def test_defaults_are_both_bounds_at_0_2_and_no_dual_clip():
    assert ClippedPolicyLoss() == ClippedPolicyLoss(0.2, None, None, None)


@properties
@given(objectives, seeds)
def test_loss_and_diagnostics_follow_the_papers(objective, seed):
    old, change, advantages = (normal(3, 4, seed=seed + i) for i in range(3))
    loss, diagnostics = _call(objective, old + change, old, advantages)
    low, high = _bounds(objective)
    for cell in range(12):
        a, r = advantages.view(-1)[cell].item(), math.exp(change.view(-1)[cell].item())
        # Schulman et al. 2017, eq. 7: the objective min(r A, clip(r) A), here to be minimised
        surrogate = min(r * a, min(max(r, low), high) * a)
        clipped = surrogate < r * a
        bound = objective.dual_clip is not None and a < 0 and surrogate < objective.dual_clip * a
        # Ye et al. 2020, eq. 5: max(surrogate, c A) where A < 0
        expected = -objective.dual_clip * a if bound else -surrogate
        assert_close(loss.view(-1)[cell], expected)
        assert diagnostics["clip_fraction"].view(-1)[cell] == clipped
        assert diagnostics["dual_clip_fraction"].view(-1)[cell] == bound
        assert_close(diagnostics["approx_kl"].view(-1)[cell], r - 1 - math.log(r))


@pytest.mark.parametrize("case", [0, 1, 2])
def test_loss_gradient_and_clip_fractions_equal_those_of_verl(case):
    recorded = golden("verl")
    inputs, expected = recorded["inputs"], recorded["outputs"]["policy_loss"][case]
    arguments = expected["arguments"]
    objective = ClippedPolicyLoss(
        arguments["cliprange"],
        arguments.get("cliprange_low"),
        arguments.get("cliprange_high"),
        None if arguments["clip_ratio_c"] == 1e9 else arguments["clip_ratio_c"],
    )
    mask = float64(inputs["mask"]).bool()
    logprobs = float64(inputs["logprobs"]).requires_grad_()
    loss, diagnostics = objective(logprobs, float64(inputs["old_logprobs"]), float64(inputs["advantages"]), mask)
    assert_close(loss[mask], float64(expected["token_losses"])[mask])
    loss[mask].mean().backward()
    assert_close(logprobs.grad, expected["gradient_of_mean"])
    for name in ("clip_fraction", "dual_clip_fraction"):
        assert_close(diagnostics[name][mask].mean(), expected[name])


def test_recorded_cases_activate_every_clip():
    cases = golden("verl")["outputs"]["policy_loss"]
    assert all(0 < case["clip_fraction"] < 1 for case in cases)
    assert [case["dual_clip_fraction"] > 0 for case in cases] == [False, False, True]


@properties
@given(objectives, seeds)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(objective, seed):
    # through a softmax, so that it is grad log pi that is weighted by -A, and not a number
    logits, advantages = normal(3, 5, seed=seed).requires_grad_(), normal(3, seed=seed + 1)
    logprobs = logits.log_softmax(-1)[:, 2]
    loss, diagnostics = _call(objective, logprobs, logprobs.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (policy_gradient,) = torch.autograd.grad((-advantages * logprobs).sum(), logits)
    assert_close(gradient, policy_gradient)
    assert_close(loss, -advantages)
    for value in diagnostics.values():
        assert_close(value, torch.zeros(3))


@properties
@given(objectives, seeds)
def test_zero_advantage_gives_zero_loss_and_zero_gradient(objective, seed):
    logprobs = normal(2, 3, seed=seed).requires_grad_()
    loss, _ = _call(objective, logprobs, normal(2, 3, seed=seed + 1), torch.zeros(2, 3))
    loss.sum().backward()
    assert_close(loss, torch.zeros(2, 3))
    assert_close(logprobs.grad, torch.zeros(2, 3))


@properties
@given(objectives, seeds)
def test_gradient_is_minus_a_times_the_ratio_unless_a_clip_binds(objective, seed):
    change, advantages = normal(4, 5, seed=seed), normal(4, 5, seed=seed + 1)
    logprobs = change.clone().requires_grad_()
    loss, diagnostics = _call(objective, logprobs, torch.zeros(4, 5), advantages)
    loss.sum().backward()
    bound = (diagnostics["clip_fraction"] + diagnostics["dual_clip_fraction"]).bool()
    assert_close(logprobs.grad, torch.where(bound, 0.0, -advantages * change.exp()))


@properties
@given(objectives, seeds)
def test_tokens_are_independent(objective, seed):
    old, new, advantages = (normal(3, 4, seed=seed + i) for i in range(3))
    whole = _call(objective, new, old, advantages)[0]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    permuted = _call(objective, *(tensor.flatten()[order] for tensor in (new, old, advantages)))[0]
    assert_close(permuted, whole.flatten()[order])
    new[0, 0] = torch.nan
    assert_close(_call(objective, new, old, advantages)[0].flatten()[1:], whole.flatten()[1:])


def test_ratio_exactly_at_a_bound_is_not_counted_as_clipped():
    ratio = float64(1.0).exp().item()
    for advantage in (-1.0, 1.0):
        objective = ClippedPolicyLoss(clip_range_high=ratio - 1, dual_clip=ratio)
        loss, diagnostics = _call(objective, float64(1.0), float64(0.0), float64(advantage))
        assert_close(loss, -advantage * ratio)
        assert diagnostics["clip_fraction"] == diagnostics["dual_clip_fraction"] == 0


@properties
@given(seeds)
def test_approx_kl_estimates_the_divergence_from_old_to_new(seed):
    old, new = (normal(6, seed=seed + i).log_softmax(-1) for i in range(2))
    exact = sum(math.exp(p) * (p - q) for p, q in zip(old.tolist(), new.tolist(), strict=True))
    _, diagnostics = _call(ClippedPolicyLoss(), new, old, torch.ones(6))
    assert_close((old.exp() * diagnostics["approx_kl"]).sum(), exact)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [-1e3, 0.0, 1e3])
@pytest.mark.parametrize("difference", [-1e4, -21.0, 21.0, 1e4, math.inf, -math.inf])
def test_huge_differences_give_finite_losses_and_gradients(difference, advantage, dual_clip):
    logprobs = torch.tensor([difference], requires_grad=True)
    objective = ClippedPolicyLoss(dual_clip=dual_clip)
    loss, diagnostics = _call(objective, logprobs, torch.zeros(1), torch.tensor([advantage]))
    loss.sum().backward()
    for tensor in (loss, logprobs.grad, *diagnostics.values()):
        assert tensor.isfinite().all()


def test_log_ratios_are_exact_up_to_20():
    objective, ones = ClippedPolicyLoss(), torch.ones(4, dtype=torch.float64)
    loss, diagnostics = _call(objective, float64([19.5, 20.5, -19.5, -20.5]), 0 * ones, -ones)
    assert_close(loss, [math.exp(19.5), math.exp(20), 0.8, 0.8])
    expected = [math.exp(19.5) - 20.5, math.exp(20) - 21, math.exp(-19.5) + 18.5, math.exp(-20) + 19]
    assert_close(diagnostics["approx_kl"], expected)


def test_diagnostics_have_no_gradient():
    logprobs = normal(3, seed=0).requires_grad_()
    _, diagnostics = _call(ClippedPolicyLoss(dual_clip=2.0), logprobs, torch.zeros(3), torch.ones(3))
    assert set(diagnostics) == {"clip_fraction", "dual_clip_fraction", "approx_kl"}
    assert not any(value.requires_grad for value in diagnostics.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_range": 0.0}, r"^clip_range must lie in \(0, 1\), got 0.0$"),
        ({"clip_range": 1.0}, r"^clip_range must lie in \(0, 1\), got 1.0$"),
        ({"clip_range_low": 0.0}, r"^clip_range_low must lie in \(0, 1\] or null, got 0.0$"),
        ({"clip_range_low": 1.1}, r"^clip_range_low must lie in \(0, 1\] or null, got 1.1$"),
        ({"clip_range_high": 0.0}, r"^clip_range_high must be positive or null, got 0.0$"),
        ({"dual_clip": 1.0}, r"^dual_clip must be greater than 1 or null, got 1.0$"),
    ],
)
def test_invalid_bounds_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClippedPolicyLoss(**arguments)


def test_bounds_at_the_edge_of_their_ranges_are_allowed():
    ClippedPolicyLoss(clip_range=0.99, clip_range_low=1.0, clip_range_high=1e-3, dual_clip=1.01)
