"""Advantages from future rewards: by hand, by loops from the papers, and as computed by verl."""

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline, ToolOptimalTokenBaseline
from lightning_rlhf.objectives.base import AdvantageInputs
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus, ReMax
from tests.helpers import assert_close, float64, golden, over_ranks, properties, with_garbage
from tests.objectives.advantage_inputs import batches, inside, random_inputs, recorded, rows_of

# Rewards to come, undiscounted: 3, 3, 2 and 5, -, 4.
REWARDS = float64([[0, 1, 2], [1, 9, 4]])
MASK = torch.tensor([[True, True, True], [True, False, True]])
GROUP = torch.tensor([6, 6])
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def _energies(energy, mask=MASK, rewards=REWARDS, group=GROUP, **more):
    """Return a batch whose tokens have the given squared gradient norms: p = 1/2, so e = sum of squares."""
    half = torch.full_like(rewards, math.log(0.5))
    return AdvantageInputs(rewards, mask, group, logprobs=half, sum_pi_squared=float64(energy), **more)


def test_reinforce_plus_plus_worked_by_hand():
    # gamma 1/2: 2; 1 + 1 = 2; 0 + 1 = 1 and 4; 1 + 2 = 3. Of 1, 2, 2, 3, 4: mean 2.4, squares 5.2, variance 1.3.
    advantages, returns = ReinforcePlusPlus(gamma=0.5)(AdvantageInputs(REWARDS, MASK, GROUP))
    scale = (1.3 + 1e-8) ** -0.5
    assert_close(returns, [[1, 2, 2], [3, 0, 4]], rtol=0, atol=0)
    assert_close(advantages, [[-1.4 * scale, -0.4 * scale, -0.4 * scale], [0.6 * scale, 0, 1.6 * scale]], rtol=1e-12)


def test_remax_worked_by_hand():
    inputs = AdvantageInputs(REWARDS, MASK, GROUP, greedy_reward=float64([1, -2]))
    advantages, returns = ReMax()(inputs)
    assert_close(returns, [[3, 3, 2], [5, 0, 4]], rtol=0, atol=0)
    assert_close(advantages, [[2, 2, 1], [7, 0, 6]], rtol=0, atol=0)


def test_optimal_token_baseline_worked_by_hand():
    # W: 1, 3, 4 and 2, -, 6 (the 7 is not the policy's).
    # B_0 = (3 x 1 + 5 x 2) / 3 = 13/3; at 1 the first is alone; B_2 = (2 x 4 + 4 x 6) / 10 = 16/5.
    inputs = _energies([[1, 2, 1], [2, 7, 4]])
    advantages, returns = OptimalTokenBaseline()(inputs)
    assert_close(returns, [[3, 3, 2], [5, 0, 4]], rtol=0, atol=0)
    assert_close(advantages, [[-4 / 3, 3, -1.2], [2 / 3, 0, 0.8]], rtol=1e-12)
    advantages, _ = OptimalTokenBaseline(handle_zero_tail=False)(inputs)
    assert_close(advantages, [[-4 / 3, 0, -1.2], [2 / 3, 0, 0.8]], rtol=1e-12)


def test_tool_optimal_token_baseline_worked_by_hand():
    # The second token of the policy: W 3 and 6, G 3 and 4, B = (9 + 24) / 9 = 11/3; the third: the first alone.
    inputs = _energies([[1, 2, 1], [2, 7, 4]])
    advantages, returns = ToolOptimalTokenBaseline()(inputs)
    assert_close(returns, [[3, 3, 2], [5, 0, 4]], rtol=0, atol=0)
    assert_close(advantages, [[-4 / 3, -2 / 3, 2], [2 / 3, 0, 1 / 3]], rtol=1e-12)
    advantages, _ = ToolOptimalTokenBaseline(handle_zero_tail=False)(inputs)
    assert_close(advantages, [[-4 / 3, -2 / 3, 0], [2 / 3, 0, 1 / 3]], rtol=1e-12)


def test_energy_of_a_distribution_worked_by_hand():
    # p = 0.6 of (0.6, 0.3, 0.1): 1 - 1.2 + 0.46 = 0.26 = 0.4^2 + 0.3^2 + 0.1^2; p = 0.1: 1 - 0.2 + 0.46 = 1.26.
    # Weights 2 and 1: 1.04 and 1.26. B = (1 x 1.04 + 4 x 1.26) / 2.3
    inputs = AdvantageInputs(
        token_rewards=float64([[1], [4]]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        group=GROUP,
        logprobs=float64([[0.6], [0.1]]).log(),
        sum_pi_squared=float64([[0.46], [0.46]]),
        weights=float64([[2], [1]]),
    )
    baseline = (1.04 + 4 * 1.26) / 2.3
    assert_close(OptimalTokenBaseline()(inputs)[0], [[1 - baseline], [4 - baseline]], rtol=1e-12)


def _token_baseline(inputs, compact, zero_tail):
    """Return baselines by loops over groups, positions and responses, from the paper's B_t."""
    rows = range(len(inputs.mask))
    steps = [[t for t in range(inputs.mask.shape[1]) if inputs.mask[row, t]] for row in rows]
    energy, returns = {}, {}
    for row in rows:
        total = 0.0
        for t in steps[row]:
            p, squares = inputs.logprobs[row, t].exp().item(), inputs.sum_pi_squared[row, t].item()
            weight = 1.0 if inputs.weights is None else inputs.weights[row, t].item()
            total += (1 - 2 * p + squares) * weight**2
            energy[row, t] = total
            returns[row, t] = math.fsum(inputs.token_rewards[row, s].item() for s in steps[row] if s >= t)
    expected = [[0.0] * inputs.mask.shape[1] for _ in rows]
    for row in rows:
        group = [other for other in rows if inputs.group[other] == inputs.group[row] and steps[other]]
        for position, t in enumerate(steps[row]):
            at = [(o, steps[o][position]) for o in group if position < len(steps[o])] if compact else [
                (o, t) for o in group if t in steps[o]
            ]  # fmt: skip
            total = sum(energy[cell] for cell in at)
            baseline = sum(returns[cell] * energy[cell] for cell in at) / total if total > 0 else 0.0
            if zero_tail and len(at) == 1:
                baseline = 0.0
            expected[row][t] = returns[row, t] - baseline if len(group) > 1 else 0.0
    return expected


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("estimator", [OptimalTokenBaseline, ToolOptimalTokenBaseline])
def test_token_baselines_are_those_of_loops(estimator, zero_tail):
    @properties
    @given(batches(), st.booleans())
    def check(inputs, weighted):
        if not weighted:
            inputs = dataclasses.replace(inputs, weights=None)
        advantages, returns = estimator(handle_zero_tail=zero_tail)(inputs)
        compact = estimator is ToolOptimalTokenBaseline
        assert_close(advantages, _token_baseline(inputs, compact, zero_tail), **CLOSE)
        assert_close(returns, ReMax()(inputs)[1], rtol=0, atol=0)

    check()


@properties
@given(batches(), st.floats(0, 1))
def test_reinforce_plus_plus_is_that_of_loops_over_tokens(inputs, gamma):
    sums = []
    for rewards in inside(inputs.token_rewards, inputs.mask):
        sums.extend(sum(gamma**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards)))
    mean = statistics.fmean(sums) if sums else 0.0
    scale = ((statistics.variance(sums) if len(sums) > 1 else 0) + 1e-8) ** -0.5
    advantages, returns = ReinforcePlusPlus(gamma)(inputs)
    assert_close(returns[inputs.mask], float64(sums), **CLOSE)
    assert_close(advantages[inputs.mask], float64([(value - mean) * scale for value in sums]), rtol=1e-8, atol=1e-9)
    assert (advantages[~inputs.mask] == 0).all()
    assert (returns[~inputs.mask] == 0).all()


@properties
@given(batches())
def test_remax_is_that_of_loops_over_tokens(inputs):
    advantages, _ = ReMax()(inputs)
    for row, rewards in enumerate(inside(inputs.token_rewards, inputs.mask)):
        expected = [math.fsum(rewards[t:]) - inputs.greedy_reward[row].item() for t in range(len(rewards))]
        assert_close(advantages[row][inputs.mask[row]], float64(expected), **CLOSE)
    assert (advantages[~inputs.mask] == 0).all()


@pytest.mark.parametrize("kind", ["whole", "holed"])
def test_reinforce_plus_plus_equals_that_of_verl(kind):
    theirs = golden("advantages")["verl"][kind]["reinforce_plus_plus"]
    advantages, returns = ReinforcePlusPlus(theirs["gamma"])(recorded(kind))
    assert_close(advantages, float64(theirs["advantages"]), rtol=1e-7, atol=1e-12)
    assert_close(returns, float64(theirs["returns"]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["whole", "holed"])
def test_remax_equals_that_of_verl(kind):
    inputs, theirs = recorded(kind), float64(golden("advantages")["verl"][kind]["remax"])
    advantages, _ = ReMax()(inputs)
    # verl leaves the rewards to come on the tokens of an environment.
    assert_close(advantages, theirs.masked_fill(~inputs.mask, 0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "estimator", "kind"),
    [
        ("otb", OptimalTokenBaseline, "whole"),
        ("tool_otb", ToolOptimalTokenBaseline, "whole"),
        ("tool_otb", ToolOptimalTokenBaseline, "holed"),
    ],
)
def test_token_baselines_equal_those_of_verl(name, estimator, kind):
    inputs, theirs = recorded(kind), golden("advantages")
    weights = with_garbage(float64(theirs["inputs"]["weights"]), inputs.mask)
    for suffix, ours in (
        ("", estimator()(inputs)),
        ("_tail", estimator(handle_zero_tail=False)(inputs)),
        ("_weights", estimator()(dataclasses.replace(inputs, weights=weights))),
    ):
        # verl adds 1e-8 to the denominator, which shows where the policy was sure of its tokens.
        assert_close(ours[0], float64(theirs["verl"][kind][name + suffix]), rtol=1e-6, atol=1e-7)


@properties
@given(batches(min_rows=2), st.floats(0, 1))
def test_reinforce_plus_plus_whitens_over_all_ranks(inputs, gamma):
    estimator = ReinforcePlusPlus(gamma)
    halves = slice(0, 1), slice(1, None)
    each = over_ranks(*(lambda ranks, h=half: estimator(rows_of(inputs, h), ranks)[0] for half in halves))
    assert_close(torch.cat(each), estimator(inputs)[0], **CLOSE)


def test_policy_tokens_of_long_responses_keep_their_order():
    mask = torch.arange(400).view(1, -1) % torch.tensor([[2], [3]]) != 0
    inputs = random_inputs(mask, [0, 0], seed=4)
    advantages, _ = ToolOptimalTokenBaseline()(inputs)
    assert_close(advantages, _token_baseline(inputs, compact=True, zero_tail=True), **CLOSE)


def test_token_baseline_is_the_mean_of_the_group_for_equal_tokens():
    inputs = _energies([[1, 1], [1, 1], [1, 1]], torch.ones(3, 2, dtype=torch.bool), float64([[0, 1], [0, 4], [0, 7]]),
                       torch.zeros(3, dtype=torch.int64))  # fmt: skip
    assert_close(OptimalTokenBaseline()(inputs)[0], [[-3, -3], [0, 0], [3, 3]], rtol=1e-12)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("estimator", [OptimalTokenBaseline, ToolOptimalTokenBaseline])
def test_group_of_one_has_no_token_baseline_and_advantage_0(estimator, zero_tail):
    inputs = _energies([[1, 2, 1], [2, 7, 4]], group=torch.tensor([1, 2]))
    advantages, returns = estimator(handle_zero_tail=zero_tail)(inputs)
    assert (advantages == 0).all()
    assert_close(returns, [[3, 3, 2], [5, 0, 4]], rtol=0, atol=0)


@pytest.mark.parametrize("estimator", [OptimalTokenBaseline(), ToolOptimalTokenBaseline()])
def test_tokens_of_probability_1_are_finite(estimator):
    # p = 1: energy 0, so nothing weighs anything; and p = 0, whose log is -inf.
    inputs = dataclasses.replace(
        _energies([[1, 1, 1], [1, 9, 1]]), logprobs=float64([[0, 0, -math.inf], [0, math.nan, -math.inf]])
    )
    advantages, _ = estimator(inputs)
    assert advantages.isfinite().all()
    assert_close(advantages[:, 0], [3, 5], rtol=0, atol=0)


def test_negative_rounding_error_is_not_an_energy():
    # Energies of -1e-7 and 2e-7: the first counts as 0, so B is the second's 5; unclamped it would be 7.
    energy = [[1 - 1e-7] * 3, [1 + 2e-7] * 3]
    inputs = dataclasses.replace(_energies(energy), logprobs=torch.zeros(2, 3).double())
    assert_close(OptimalTokenBaseline()(inputs)[0][:, 0], [-2, 0], rtol=0, atol=1e-7)


def test_defaults_and_required_inputs():
    assert ReinforcePlusPlus() == ReinforcePlusPlus(gamma=1.0)
    assert OptimalTokenBaseline() == OptimalTokenBaseline(handle_zero_tail=True)
    marks = ("needs_critic", "needs_groups", "needs_greedy", "needs_sum_pi_squared")
    for estimator, expected in (
        (ReinforcePlusPlus(), set()),
        (ReMax(), {"needs_greedy"}),
        (OptimalTokenBaseline(), {"needs_groups", "needs_sum_pi_squared"}),
        (ToolOptimalTokenBaseline(), {"needs_groups", "needs_sum_pi_squared"}),
    ):
        assert {mark for mark in marks if getattr(estimator, mark)} == expected


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_discounts_outside_the_unit_interval_are_rejected(gamma):
    with pytest.raises(ValueError, match=rf"^gamma must lie in \[0, 1\], got {gamma}$"):
        ReinforcePlusPlus(gamma)


def test_missing_inputs_are_reported():
    bare = AdvantageInputs(REWARDS, MASK, GROUP)
    with pytest.raises(ValueError, match=r"^ReMax needs the reward of a greedy response to each prompt$"):
        ReMax()(bare)
    for inputs in (
        bare,
        dataclasses.replace(bare, logprobs=REWARDS),
        dataclasses.replace(bare, sum_pi_squared=REWARDS),
    ):
        with pytest.raises(ValueError, match=r"^the optimal token baseline needs log-probabilities and sums of"):
            OptimalTokenBaseline()(inputs)
