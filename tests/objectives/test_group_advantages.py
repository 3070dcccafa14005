"""Advantages of whole responses: by hand, by loops from the papers, and as computed by verl and TRL."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.group_advantages import (
    GDPO,
    GPG,
    OPO,
    GRPOPassK,
    MaxRL,
    ReinforcePlusPlusBaseline,
)
from lightning_rlhf.objectives.base import AdvantageInputs
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from tests.helpers import assert_close, float64, golden, over_ranks, properties
from tests.objectives.advantage_inputs import batches, outcomes, recorded, rows_of

# 0, 1, 2, 5: mean 2, squared deviations 4 + 1 + 0 + 9 = 14, variance 14/3
REWARDS, DEVIATION = [0.0, 1.0, 2.0, 5.0], (14 / 3) ** 0.5


def _of_rows(estimator, inputs):
    """Return the advantage of each response, after a check that all of its tokens and no other positions have it."""
    advantages, returns = estimator(inputs)
    first = inputs.mask.long().argmax(dim=1, keepdim=True)
    one = advantages.gather(1, first)
    assert torch.equal(advantages, torch.where(inputs.mask, one, 0.0))
    assert_close(returns, torch.where(inputs.mask, inputs.reward.unsqueeze(1), 0.0), rtol=0, atol=0)
    return one.squeeze(1)


def _groups(inputs):
    """Return the rows with a policy token and their rewards as floats, by group."""
    groups = {}
    for row in range(len(inputs.mask)):
        if inputs.mask[row].any():
            groups.setdefault(inputs.group[row].item(), []).append(row)
    reward = [
        math.fsum(values[counts].tolist()) for values, counts in zip(inputs.token_rewards, inputs.mask, strict=True)
    ]
    return list(groups.values()), reward


def _expect(inputs, of_group):
    """Return advantages by a rule for the rewards of one group and the lengths of its responses."""
    groups, reward = _groups(inputs)
    expected = [0.0] * len(inputs.mask)
    for rows in groups:
        lengths = [int(inputs.mask[row].sum()) for row in rows]
        for row, value in zip(rows, of_group([reward[row] for row in rows], lengths), strict=True):
            expected[row] = value
    return expected


def _grpo(r, _):
    return [(x - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6) for x in r] if len(r) > 1 else [0.0]


def _dr_grpo(r, _):
    return [x - statistics.fmean(r) for x in r]


def _pass_k(r, _):
    return [max(0.0, x - max(r[:i] + r[i + 1 :])) if len(r) > 1 else 0.0 for i, x in enumerate(r)]


def _pass_k_normalized(r, _):
    return [x / (statistics.stdev(r) + 1e-6) for x in _pass_k(r, _)] if len(r) > 1 else [0.0]


def _max_rl(r, _):
    mean = statistics.fmean(r)
    return [(x - mean) / mean if mean > 1e-6 else 0.0 for x in r]


def _rloo(r, _):
    return [x - statistics.fmean(r[:i] + r[i + 1 :]) if len(r) > 1 else 0.0 for i, x in enumerate(r)]


def _opo(r, lengths):
    baseline = math.fsum(a * b for a, b in zip(r, lengths, strict=True)) / sum(lengths)
    return [x - baseline for x in r]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (GRPO(), [-2 / (DEVIATION + 1e-6), -1 / (DEVIATION + 1e-6), 0, 3 / (DEVIATION + 1e-6)]),
        (GRPO(eps=0.5), [-2 / (DEVIATION + 0.5), -1 / (DEVIATION + 0.5), 0, 3 / (DEVIATION + 0.5)]),
        (GRPO(normalize_std=False), [-2, -1, 0, 3]),
        (GRPOPassK(), [0, 0, 0, 3 / (DEVIATION + 1e-6)]),
        (GRPOPassK(normalize_std=False), [0, 0, 0, 3]),
        # (R - 2) / 2
        (MaxRL(), [-1, -0.5, 0, 1.5]),
        # The others' means: 8/3, 7/3, 2, 1
        (RLOO(), [-8 / 3, -4 / 3, 0, 4]),
        # Lengths 1, 2, 1, 4: baseline (0 + 2 + 2 + 20) / 8 = 3
        (OPO(), [-3, -2, -1, 2]),
    ],
)
def test_one_group_worked_by_hand(estimator, expected):
    inputs = outcomes(REWARDS, [4] * 4, lengths=[1, 2, 1, 4])
    assert_close(_of_rows(estimator, inputs), expected, rtol=1e-12, atol=1e-14)


def test_gpg_compensates_for_groups_of_equal_rewards_worked_by_hand():
    # 4 responses in group 1, 2 in group 2 whose rewards are equal, 1 alone: B = 7, M = 3, alpha = 7/4.
    inputs = outcomes([*REWARDS, 3, 3, 9], [1, 1, 1, 1, 2, 2, 3])
    assert_close(_of_rows(GPG(), inputs), [-3.5, -1.75, 0, 5.25, 0, 0, 0], rtol=1e-12)


def test_reinforce_plus_plus_baseline_worked_by_hand():
    # Rewards less their means: -1, 1 and -3, 3; over the tokens (lengths 1, 3, 1, 1): -1, 1, 1, 1, -3, 3.
    # mean 1/3; squares 1 + 3 + 9 + 9 = 22, less 6/9: 64/3; variance 64/15.
    inputs = outcomes([0, 2, 4, 10], [1, 1, 2, 2], lengths=[1, 3, 1, 1])
    scale = (64 / 15 + 1e-8) ** -0.5
    expected = [-4 / 3 * scale, 2 / 3 * scale, -10 / 3 * scale, 8 / 3 * scale]
    assert_close(_of_rows(ReinforcePlusPlusBaseline(), inputs), expected, rtol=1e-12)


def test_gdpo_worked_by_hand():
    # a: group 1 holds 0, 2: -1, 1 over sqrt 2; group 2 holds 1, 1: 0, 0.
    # b: group 1 holds 5, 1: 2, -2 over sqrt 8; group 2 holds 0, 4: -2, 2 over sqrt 8.    With h = sqrt(1/2) and
    # weights 1 and 3: S = -h + 3h = 2h, -2h, -3h, 3h: mean 0, squares 26 / 2 = 13, variance 13/3.
    inputs = outcomes([0, 0, 0, 0], [1, 1, 2, 2], lengths=[1, 5, 2, 2])
    named = {"a": float64([0, 2, 1, 1]), "b": float64([5, 1, 0, 4]), "unused": float64([7, -7, 9, 0])}
    inputs = AdvantageInputs(inputs.token_rewards, inputs.mask, inputs.group, rewards=named)
    half, scale = 0.5**0.5, (13 / 3) ** -0.5
    expected = [2 * half * scale, -2 * half * scale, -3 * half * scale, 3 * half * scale]
    gdpo = GDPO(("a", "b"), (1.0, 3.0), eps=1e-12)
    assert_close(_of_rows(gdpo, inputs), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "rule"),
    [
        (GRPO(), _grpo),
        (GRPO(normalize_std=False), _dr_grpo),
        (GRPOPassK(), _pass_k_normalized),
        (GRPOPassK(normalize_std=False), _pass_k),
        (RLOO(), _rloo),
        (OPO(), _opo),
    ],
)
def test_advantages_are_those_of_a_loop_over_groups(estimator, rule):
    @properties
    @given(batches())
    def check(inputs):
        assert_close(_of_rows(estimator, inputs), float64(_expect(inputs, rule)), rtol=1e-9, atol=1e-11)

    check()


@properties
@given(batches())
def test_maximum_likelihood_is_that_of_a_loop_over_groups(inputs):
    inputs = AdvantageInputs(inputs.token_rewards.abs(), inputs.mask, inputs.group)
    assert_close(_of_rows(MaxRL(), inputs), float64(_expect(inputs, _max_rl)), rtol=1e-9, atol=1e-11)


def test_maximum_likelihood_sums_to_the_gradient_of_the_log_of_the_fraction_correct():
    # d log p = (d p) / p: with rewards of 0 and 1, correct responses have (1 - p) / p, the others -1.
    inputs = outcomes([1, 0, 0, 0], [3] * 4)
    assert_close(_of_rows(MaxRL(), inputs), [3, -1, -1, -1], rtol=1e-12)
    assert not _of_rows(MaxRL(), outcomes([0, 0, 0, 0], [3] * 4)).any()
    assert not _of_rows(MaxRL(), outcomes([1, 1, 1, 1], [3] * 4)).any()


@properties
@given(batches(), st.booleans())
def test_gpg_is_that_of_a_loop_over_groups(inputs, flat):
    if flat:  # rewards of -1, 0 and 1, so that some groups are of equal rewards
        inputs = AdvantageInputs(inputs.token_rewards.sign(), inputs.mask, inputs.group)
    groups, reward = _groups(inputs)
    responses = sum(map(len, groups))
    equal = sum(len(rows) for rows in groups if len({reward[row] for row in rows}) == 1)
    alpha = responses / (responses - equal) if responses > equal else 0
    expected = [alpha * value for value in _expect(inputs, _dr_grpo)]
    assert_close(_of_rows(GPG(), inputs), float64(expected), rtol=1e-9, atol=1e-11)


@properties
@given(batches())
def test_reinforce_plus_plus_baseline_is_that_of_a_loop_over_tokens(inputs):
    groups, _ = _groups(inputs)
    centered = _expect(inputs, _dr_grpo)
    compared = [row for rows in groups if len(rows) > 1 for row in rows]
    tokens = [centered[row] for row in compared for _ in range(int(inputs.mask[row].sum()))]
    mean = statistics.fmean(tokens) if tokens else 0
    scale = ((statistics.variance(tokens) if len(tokens) > 1 else 0) + 1e-8) ** -0.5
    expected = [(value - mean) * scale if row in compared else 0 for row, value in enumerate(centered)]
    assert_close(_of_rows(ReinforcePlusPlusBaseline(), inputs), float64(expected), rtol=1e-9, atol=1e-10)


@properties
@given(batches())
def test_gdpo_is_that_of_a_loop_over_rewards_and_groups(inputs):
    groups, _ = _groups(inputs)
    total, compared = [0.0] * len(inputs.mask), set()
    for key, weight in (("exact", 2.0), ("style", -0.5)):
        values = inputs.rewards[key].tolist()
        for rows in groups:
            applies = [row for row in rows if not math.isnan(values[row])]
            if len(applies) > 1:
                compared.update(applies)
                for row, value in zip(applies, _grpo([values[row] for row in applies], None), strict=True):
                    total[row] += weight * value
    counted = [total[row] for row in compared]
    mean = statistics.fmean(counted) if counted else 0
    std = (statistics.stdev(counted) if len(counted) > 1 else 0) + 1e-6
    expected = [(value - mean) / std if row in compared else 0 for row, value in enumerate(total)]
    gdpo = GDPO(("exact", "style"), (2.0, -0.5))
    assert_close(_of_rows(gdpo, inputs), float64(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["whole", "holed"])
@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("grpo", GRPO()),
        ("dr_grpo", GRPO(normalize_std=False)),
        ("grpo_passk", GRPOPassK()),
        ("grpo_passk_plain", GRPOPassK(normalize_std=False)),
        ("rloo", RLOO()),
        ("opo", OPO()),
        ("reinforce_plus_plus_baseline", ReinforcePlusPlusBaseline()),
    ],
)
def test_advantages_equal_those_of_verl(name, estimator, kind):
    advantages, _ = estimator(recorded(kind))
    assert_close(advantages, float64(golden("advantages")["verl"][kind][name]), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("kind", ["whole", "holed"])
def test_gpg_is_verls_where_only_groups_without_spread_have_rewards_of_0(kind):
    inputs = recorded(kind)
    rewards = torch.zeros_like(inputs.token_rewards)
    rewards[:, 0] = float64(golden("advantages")["inputs"]["outcomes"])
    advantages, _ = GPG()(AdvantageInputs(rewards, inputs.mask, inputs.group))
    assert_close(advantages, float64(golden("advantages")["verl"][kind]["gpg"]), rtol=1e-12, atol=1e-14)


def test_gdpo_with_inapplicable_rewards_equals_that_of_trl():
    theirs, named = golden("advantages")["trl"]["gdpo"], recorded().rewards
    inputs = outcomes([0.0] * 12, [row // 4 for row in range(12)])
    inputs = AdvantageInputs(inputs.token_rewards, inputs.mask, inputs.group, rewards=named)
    gdpo = GDPO(tuple(named), tuple(theirs["reward_weights"]), theirs["eps"])
    assert_close(_of_rows(gdpo, inputs), float64(theirs["advantages"]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "estimator"), [("grpo", GRPO(eps=1e-4)), ("rloo", RLOO())])
def test_grpo_and_rloo_of_a_weighted_sum_of_rewards_equal_those_of_trl(name, estimator):
    theirs = golden("advantages")["trl"][name]
    named = torch.stack(list(recorded().rewards.values()), dim=1).nan_to_num(0.25)
    summed = (named * float64(theirs["reward_weights"])).sum(dim=1)
    inputs = outcomes(summed.tolist(), [row // 4 for row in range(12)])
    assert_close(_of_rows(estimator, inputs), float64(theirs["advantages"]), rtol=1e-12, atol=1e-14)


ESTIMATORS = [
    GRPO(),
    GRPO(False),
    GRPOPassK(),
    MaxRL(),
    RLOO(),
    OPO(),
    GPG(),
    ReinforcePlusPlusBaseline(),
    GDPO(("only",)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_0(estimator, dtype):
    # verl's GRPO gives 0.056 here in float32: the rounding error of the mean, divided by its size plus eps.
    inputs = outcomes([0.9] * 3, [0] * 3, lengths=[2, 1, 2])
    inputs = AdvantageInputs(
        inputs.token_rewards.to(dtype), inputs.mask, inputs.group, rewards={"only": torch.full((3,), 0.9, dtype=dtype)}
    )
    advantages, returns = estimator(inputs)
    assert (advantages == 0).all()
    assert advantages.dtype == returns.dtype == dtype


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_of_one_has_no_baseline_and_advantage_0(estimator):
    inputs = outcomes([5, 1, 3, -8], [1, 2, 2, 3], lengths=[2, 1, 3, 1])
    advantages = _of_rows(estimator, inputs)
    assert advantages[0] == advantages[3] == 0
    assert_close(advantages[1:3], _of_rows(estimator, rows_of(inputs, slice(1, 3))) * (2 if estimator == GPG() else 1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_response_without_policy_token_does_not_count(estimator):
    inputs = outcomes([5, 1, 3, 7], [1, 1, 1, 1], lengths=[2, 1, 3, 0])
    advantages = _of_rows(estimator, inputs)
    assert advantages[3] == 0
    assert_close(advantages[:3], _of_rows(estimator, rows_of(inputs, slice(0, 3))), rtol=1e-12)


@pytest.mark.parametrize("best", [[5, 5, 1], [5, 5, 5], [5, 1, 5]])
def test_pass_at_k_gives_0_to_a_shared_first_place(best):
    # Without one of them the maximum stays.
    assert_close(_of_rows(GRPOPassK(), outcomes(best, [0] * 3)), [0, 0, 0], rtol=0, atol=0)


def test_gdpo_ignores_an_inapplicable_reward():
    # a is NaN for the second response: the first and third are compared, -1 and 1 over sqrt 2.
    # b applied to no response, c to one response only, so neither can be compared. The last response has no reward.
    nan = math.nan
    named = {"a": [1, nan, 3, nan], "b": [nan] * 4, "c": [nan, 4, nan, nan]}
    plain = outcomes([0] * 4, [0] * 4)
    inputs = AdvantageInputs(
        plain.token_rewards, plain.mask, plain.group, rewards={key: float64(values) for key, values in named.items()}
    )
    half = 0.5**0.5
    assert_close(_of_rows(GDPO(("a", "b", "c"), eps=1e-12), inputs), [-half, 0, half, 0], rtol=1e-9)


def test_gdpo_gives_exactly_0_without_comparable_rewards():
    # The batch's mean is 0 but for rounding, and that error is nothing to learn.
    values = [0.1, 0.7, 0.25, 0.9, 0.3, 0.6, 5.0]
    plain = outcomes([0] * 7, [0, 0, 0, 1, 1, 1, 2])
    inputs = AdvantageInputs(plain.token_rewards, plain.mask, plain.group, rewards={"only": float64(values)})
    assert _of_rows(GDPO(("only",)), inputs)[-1] == 0


def test_gdpo_by_default_weighs_all_rewards_by_1():
    inputs = recorded()
    for ours, expected in zip(GDPO(("0", "2"))(inputs), GDPO(("0", "2"), (1.0, 1.0))(inputs), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("estimator", [GPG(), ReinforcePlusPlusBaseline(), GDPO(("exact", "style"))])
def test_statistics_of_the_batch_are_those_of_all_ranks(estimator):
    @properties
    @given(batches(min_rows=3))
    def check(inputs):
        first = inputs.group == inputs.group[0]  # a group lies whole on one rank
        parts = [rows_of(inputs, first), rows_of(inputs, ~first)]
        each = over_ranks(*(lambda ranks, part=part: estimator(part, ranks)[0] for part in parts))
        alone, _ = estimator(inputs)
        assert_close(each[0], alone[first], rtol=1e-9, atol=1e-11)
        assert_close(each[1], alone[~first], rtol=1e-9, atol=1e-11)

    check()


def test_shifting_the_rewards_of_a_group_changes_nothing():
    rewards, group = [0.5, 1.5, 4.0, 1.0, -2.0], [0, 0, 0, 1, 1]
    shifted = [value + (1e6 if number else -7.0) for value, number in zip(rewards, group, strict=True)]
    for estimator in [each for each in ESTIMATORS if not isinstance(each, MaxRL)]:  # whose scale is the mean
        ours = (_of_rows(estimator, outcomes(values, group, [1, 2, 3, 1, 2])) for values in (rewards, shifted))
        assert_close(*ours, rtol=1e-8, atol=1e-9)


def test_defaults_and_required_inputs():
    assert GRPO() == GRPO(normalize_std=True, eps=1e-6)
    assert GRPOPassK() == GRPOPassK(normalize_std=True, eps=1e-6)
    assert GDPO(("a",)) == GDPO(("a",), reward_weights=None, eps=1e-6)
    for estimator in ESTIMATORS:
        assert estimator.needs_groups
        assert estimator.reads_total_reward == (not isinstance(estimator, GDPO))
        for mark in ("needs_critic", "needs_greedy", "needs_sum_pi_squared"):
            assert not getattr(estimator, mark)


@pytest.mark.parametrize("eps", [0, -1e-6, math.inf, math.nan])
@pytest.mark.parametrize("make", [GRPO, GRPOPassK, lambda eps: GDPO(("a",), eps=eps)])
def test_eps_must_be_positive_and_finite(make, eps):
    with pytest.raises(ValueError, match=rf"^eps must be positive and finite, got {eps}$"):
        make(eps=eps)


def test_gdpo_requires_names_and_as_many_finite_weights():
    with pytest.raises(ValueError, match=r"^reward_keys must name at least one reward, got none$"):
        GDPO(())
    for weights in ((1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (math.inf, 1.0)):
        with pytest.raises(
            ValueError, match=r"^reward_weights must be one finite number for each of \['a', 'b'\], got"
        ):
            GDPO(("a", "b"), weights)


def test_gdpo_reports_missing_and_available_rewards():
    with pytest.raises(ValueError, match=r"^GDPO needs rewards named \['exact'\], got \['only'\]$"):
        GDPO(("only", "exact"))(outcomes([1, 2], [0, 0]))
