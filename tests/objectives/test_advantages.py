import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.base import AdvantageInputs
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
from tests.objectives.advantage_inputs import recorded
from tests.shapes import unchecked

REWARDS = float64([[1, 0, 2], [1, 9, 9]])
VALUES = float64([[1, 2, 1], [0.5, 9, 9]])
MASK = torch.tensor([[True, True, True], [True, False, False]])

discounts = st.floats(0, 1)


def _inputs(rewards, values, mask, final_values=None):
    return AdvantageInputs(rewards, mask, torch.arange(len(mask)), values=values, final_values=final_values)


def _compacted(row, mask):
    """Return the values of a row inside the mask."""
    return [value for value, counts in zip(row.tolist(), mask.tolist(), strict=True) if counts]


def test_advantages_and_returns_of_a_case_worked_by_hand():
    # gamma = lambda = 1/2, backwards through the first row:
    # delta_2 = 2 - 1 = 1               A_2 = 1
    # delta_1 = 0 + 1/2 - 2 = -3/2      A_1 = -3/2 + 1/4 = -5/4
    # delta_0 = 1 + 2/2 - 1 = 1         A_0 = 1 - 5/16 = 11/16
    advantages, returns = GAE(gamma=0.5, gae_lambda=0.5, whiten=False)(_inputs(REWARDS, VALUES, MASK))
    assert_close(advantages, [[0.6875, -1.25, 1], [0.5, 0, 0]])
    assert_close(returns, [[1.6875, 0.75, 2], [1, 0, 0]])


def test_whitening_a_case_worked_by_hand_changes_advantages_and_not_returns():
    # 0.6875, -1.25, 1, 0.5: mean 0.234375, variance 3.0654297 / 3
    advantages, returns = GAE(gamma=0.5, gae_lambda=0.5)(_inputs(REWARDS, VALUES, MASK))
    assert_close(advantages, [[0.4482631, -1.468448, 0.75741], [0.2627749, 0, 0]], rtol=1e-6)
    assert_close(returns, [[1.6875, 0.75, 2], [1, 0, 0]])


def test_defaults_are_undiscounted_with_lambda_0_95_and_whitened():
    assert GAE() == GAE(gamma=1.0, gae_lambda=0.95, whiten=True, bootstrap_truncated=False)


@properties
@given(masks(), discounts, discounts, seeds)
def test_advantages_are_the_sum_of_the_papers_equation_16(mask, gamma, gae_lambda, seed):
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    advantages, returns = GAE(gamma, gae_lambda, whiten=False)(_inputs(rewards, values, mask))
    for row in range(len(mask)):
        r, v = _compacted(rewards[row], mask[row]), [*_compacted(values[row], mask[row]), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = [
            sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(len(delta) - t)) for t in range(len(delta))
        ]
        assert_close(advantages[row][mask[row]], float64(expected))
        assert_close(returns[row][mask[row]], float64([a + b for a, b in zip(expected, v, strict=False)]))
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@pytest.mark.parametrize("case", [0, 1])
def test_whitened_advantages_and_returns_equal_those_of_verl(case):
    recorded = golden("verl")
    inputs, expected = recorded["inputs"], recorded["outputs"]["gae"][case]
    mask = float64(inputs["mask"]).bool()
    advantages, returns = GAE(expected["gamma"], expected["lam"])(
        _inputs(float64(inputs["rewards"]), float64(inputs["old_values"]), mask)
    )
    assert_close(advantages[mask], float64(expected["advantages"])[mask])
    assert_close(returns[mask], float64(expected["returns"])[mask])


def test_truncated_response_continues_with_the_final_value_worked_by_hand():
    # gamma = lambda = 1/2; the first row was truncated where the value is 4, the second was finished.
    # delta_2 = 2 + 4/2 - 1 = 3         A_2 = 3
    # delta_1 = 0 + 1/2 - 2 = -3/2      A_1 = -3/2 + 3/4 = -3/4
    # delta_0 = 1 + 2/2 - 1 = 1         A_0 = 1 - 3/16 = 13/16
    gae = GAE(gamma=0.5, gae_lambda=0.5, whiten=False, bootstrap_truncated=True)
    advantages, returns = gae(_inputs(REWARDS, VALUES, MASK, final_values=float64([4, 0])))
    assert_close(advantages, [[0.8125, -0.75, 3], [0.5, 0, 0]], rtol=1e-12)
    assert_close(returns, [[1.8125, 1.25, 4], [1, 0, 0]], rtol=1e-12)


@properties
@given(masks(), discounts, discounts, seeds)
def test_truncated_responses_equal_the_sum_of_equation_16_with_the_final_value(mask, gamma, gae_lambda, seed):
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    final = normal(len(mask), seed=seed + 2)
    gae = GAE(gamma, gae_lambda, whiten=False, bootstrap_truncated=True)
    advantages, returns = gae(_inputs(with_garbage(rewards, mask), with_garbage(values, mask), mask, final))
    for row in range(len(mask)):
        r, v = _compacted(rewards[row], mask[row]), [*_compacted(values[row], mask[row]), final[row].item()]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = [
            sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(len(delta) - t)) for t in range(len(delta))
        ]
        assert_close(advantages[row][mask[row]], float64(expected), rtol=1e-9, atol=1e-11)
        assert_close(
            returns[row][mask[row]], float64([a + b for a, b in zip(expected, v, strict=False)]), rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("kind", ["whole", "holed"])
def test_truncated_responses_equal_verl_with_the_discounted_final_value_in_the_last_reward(kind):
    inputs, expected = recorded(kind), golden("advantages")["verl"][kind]["gae_truncated"]
    gae = GAE(expected["gamma"], expected["lam"], bootstrap_truncated=True)
    for ours, theirs in zip(gae(inputs), (expected["advantages"], expected["returns"]), strict=True):
        assert_close(ours[inputs.mask], float64(theirs)[inputs.mask], rtol=1e-7)


def test_final_values_count_only_if_requested():
    inputs = _inputs(REWARDS, VALUES, MASK, final_values=float64([4, 5]))
    for ours, expected in zip(GAE()(inputs), GAE()(_inputs(REWARDS, VALUES, MASK)), strict=True):
        assert torch.equal(ours, expected)
    assert GAE().needs_critic


def test_missing_values_are_rejected():
    with pytest.raises(ValueError, match=r"^GAE needs the values of a critic$"):
        GAE()(_inputs(REWARDS, None, MASK))
    with pytest.raises(ValueError, match=r"^GAE with bootstrap_truncated needs the critic's final values$"):
        GAE(bootstrap_truncated=True)(_inputs(REWARDS, VALUES, MASK))


@properties
@given(masks(), discounts, seeds)
def test_lambda_1_gives_discounted_sums_of_rewards_as_returns(mask, gamma, seed):
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    _, returns = GAE(gamma, 1.0)(_inputs(rewards, values, mask))
    for row in range(len(mask)):
        r = _compacted(rewards[row], mask[row])
        expected = [sum(gamma**k * reward for k, reward in enumerate(r[t:])) for t in range(len(r))]
        assert_close(returns[row][mask[row]], float64(expected))


def test_lambda_0_gives_one_step_errors():
    advantages, _ = GAE(gamma=0.5, gae_lambda=0.0, whiten=False)(_inputs(REWARDS, VALUES, MASK))
    assert_close(advantages, [[1, -1.5, 1], [0.5, 0, 0]])


@properties
@given(masks(), st.integers(1, 3), st.booleans(), seeds)
def test_padding_and_garbage_change_nothing(mask, columns, whiten, seed):
    gae = GAE(0.9, 0.8, whiten)
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    padded_mask = pad_columns(mask, columns)
    padded = (with_garbage(pad_columns(tensor, columns), padded_mask) for tensor in (rewards, values))
    for ours, expected in zip(gae(_inputs(*padded, padded_mask)), gae(_inputs(rewards, values, mask)), strict=True):
        assert_close(ours, pad_columns(expected, columns))


@properties
@given(masks(), seeds)
def test_environment_tokens_neither_decay_nor_bootstrap(mask, seed):
    gae = GAE(0.9, 0.8, whiten=False)
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    holed = gae(_inputs(rewards, values, mask))
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        inside = mask[row : row + 1]
        whole = torch.ones(1, length, dtype=torch.bool)
        if length:  # the same row without the holes
            numbers = (tensor[row : row + 1][inside].view(1, -1) for tensor in (rewards, values))
            compact = gae(_inputs(*numbers, whole))
            for ours, expected in zip(holed, compact, strict=True):
                assert_close(ours[row][mask[row]], expected[0])


@properties
@given(masks(), st.booleans(), seeds)
def test_permuting_rows_permutes_results(mask, whiten, seed):
    gae = GAE(0.9, 0.8, whiten)
    rewards, values = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    permuted = gae(_inputs(rewards[order], values[order], mask[order]))
    for ours, expected in zip(permuted, gae(_inputs(rewards, values, mask)), strict=True):
        assert_close(ours, expected[order])


@properties
@given(masks(min_rows=2), seeds)
def test_whitened_advantages_have_mean_0_and_variance_1_over_all_ranks(mask, seed):
    mask[0, 0] = mask[1, 0] = True
    rewards, values = normal(*mask.shape, seed=seed) + 5, normal(*mask.shape, seed=seed + 1)
    halves = slice(0, 1), slice(1, None)
    each = over_ranks(*(lambda ranks, h=half: GAE()(_inputs(rewards[h], values[h], mask[h]), ranks) for half in halves))
    advantages, returns = (torch.cat(parts) for parts in zip(*each, strict=True))
    alone = GAE()(_inputs(rewards, values, mask))
    assert_close(advantages, alone[0])
    assert_close(returns, alone[1])
    assert_close(advantages[mask].mean(), 0.0)
    assert_close(advantages[mask].var(), 1.0, rtol=1e-3)


def test_batch_without_policy_tokens_gives_zeros():
    for tensor in GAE()(_inputs(REWARDS, VALUES, torch.zeros_like(MASK))):
        assert_close(tensor, torch.zeros(2, 3))


def test_equal_advantages_whiten_to_0_and_not_to_nan():
    advantages, returns = GAE()(_inputs(torch.ones(3, 1), torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool)))
    assert_close(advantages, torch.zeros(3, 1))
    assert_close(returns, torch.ones(3, 1))


def test_inputs_are_not_modified():
    rewards, values, mask = REWARDS.clone(), VALUES.clone(), MASK.clone()
    GAE()(_inputs(rewards, values, mask))
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(values, VALUES)
    assert torch.equal(mask, MASK)


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_discounts_outside_the_unit_interval_are_rejected(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must lie in \[0, 1\], got {value}$"):
        GAE(**{name: value})


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_both_ends_of_the_unit_interval_are_allowed(name):
    for value in (0, 1):
        GAE(**{name: value})


def test_integer_rewards_are_rejected_instead_of_truncated():
    ones = torch.ones(2, 3, dtype=torch.long)
    with (
        unchecked(),
        pytest.raises(ValueError, match=r"token_rewards must be of a floating-point dtype, got torch.int64"),
    ):
        AdvantageInputs(ones, ones.bool(), torch.arange(2))


def test_gae_accumulates_in_float64_for_any_dtype():
    steps = 2000
    rewards = torch.full((1, steps), 1 / 2000, dtype=torch.bfloat16)
    mask = torch.ones(1, steps, dtype=torch.bool)
    inputs = AdvantageInputs(rewards, mask, torch.zeros(1, dtype=torch.long), values=torch.zeros_like(rewards))
    advantages, returns = GAE(gae_lambda=1.0, whiten=False)(inputs)
    assert advantages.dtype == returns.dtype == torch.bfloat16
    assert float(advantages[0, 0]) == pytest.approx(float(rewards.double().sum()), rel=0.005)


# -- decoupled and length-adaptive lambda -----------------------------------------------------------------------------


def test_decoupled_lambda_of_a_case_worked_by_hand():
    # Reward 8 at the last of three tokens, values 0: delta = 0, 0, 8. Policy: alpha 2/3 and 3 tokens give lambda
    # 1 - 1/2 = 1/2: advantages 2, 4, 8. Critic: lambda 1: returns 8, 8, 8.
    inputs = _inputs(float64([[0, 0, 8]]), float64([[0, 0, 0]]), torch.ones(1, 3, dtype=torch.bool))
    gae = GAE(whiten=False, critic_lambda=1.0, length_alpha=2 / 3)
    advantages, returns = gae(inputs)
    assert_close(advantages, [[2, 4, 8]])
    assert_close(returns, [[8, 8, 8]])


@properties
@given(masks(), seeds, st.sampled_from([0.05, 0.4, 3.0]))
def test_length_adaptive_lambda_is_that_of_each_response_alone(mask, seed, alpha):
    rewards, values = (normal(*mask.shape, seed=seed + i) for i in range(2))
    gae = GAE(0.9, whiten=False, critic_lambda=0.7, length_alpha=alpha)
    advantages, returns = gae(_inputs(rewards, values, mask))
    for row in range(len(mask)):
        expected = max(0.0, 1 - 1 / (alpha * max(1, int(mask[row].sum()))))
        alone = _inputs(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1])
        assert_close(advantages[row], GAE(0.9, expected, whiten=False)(alone)[0][0], rtol=1e-12, atol=1e-12)
        assert_close(returns[row], GAE(0.9, 0.7, whiten=False)(alone)[1][0], rtol=1e-12, atol=1e-12)


def test_short_responses_have_a_lambda_of_at_least_0():
    inputs = _inputs(float64([[1, 2]]), float64([[0, 0]]), torch.ones(1, 2, dtype=torch.bool))
    assert_close(GAE(whiten=False, length_alpha=0.05)(inputs)[0], [[1, 2]])


@pytest.mark.parametrize(("name", "value"), [("critic_lambda", 1.5), ("length_alpha", 0.0)])
def test_invalid_decoupled_lambda_raises(name, value):
    with pytest.raises(ValueError, match=name):
        GAE(**{name: value})
