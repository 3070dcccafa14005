"""Token selection of the covariance losses over a whole mini-batch and all ranks, and the resulting losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.covariance_policy_losses import (
    ClipCovLoss,
    HighEntropyLoss,
    KLCovLoss,
    covariance,
    select_largest,
)
from lightning_rlhf.functional.data_ranks import ONE_RANK
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.base import PolicyTokens
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from tests.helpers import assert_close, float64, golden, masks, normal, over_ranks, properties, seeds, with_garbage
from tests.objectives.paper_loops import Case, over_tokens, ppo

LN2 = math.log(2)
RECORDED = golden("policy_losses")


CASES = {
    "clip_cov": Case(
        ClipCovLoss(0.2, 0.1, 0.4, 1.5),
        TokenMean(),
        over_tokens(
            lambda new, old, a, selected_tokens: 0 * new if selected_tokens else ppo(new, old, a, selected_tokens)
        ),
    ),
    "kl_cov": Case(
        KLCovLoss(kl_coef=0.3),
        TokenMean(),
        over_tokens(
            lambda new, old, a, selected_tokens: (
                -a * (new - old).exp() + (0.3 * abs(new - old) if selected_tokens else 0)
            )
        ),
    ),
    "high_entropy": Case(
        HighEntropyLoss(0.2, 0.1, 0.4, 1.5),
        TokenMean(),
        over_tokens(
            lambda new, old, a, selected_tokens: ppo(new, old, a, selected_tokens) if selected_tokens else 0 * new
        ),
    ),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def selected(objective, logprobs, old, advantages, mask, generator, ranks=ONE_RANK, entropies=None):
    """Return the tokens that a loss selects."""
    tokens = PolicyTokens.of(logprobs, old, advantages, mask)
    return objective.select_tokens(tokens, logprobs if entropies is None else entropies, generator, ranks)


def covariance_of(logprobs, advantages, mask, ranks=ONE_RANK):
    return covariance(PolicyTokens.of(logprobs, logprobs, advantages, mask), ranks)


def everywhere(tensor):
    return torch.ones_like(tensor, dtype=torch.bool)


def batch(mask, seed):
    old = -normal(*mask.shape, seed=seed).abs()
    return old + 0.4 * normal(*mask.shape, seed=seed + 1), old, 2 * normal(*mask.shape, seed=seed + 2), mask


def covariances(logprobs, advantages, mask):
    """Return cov of each token by Cui et al. 2025, section 4.2: {(row, column): (log pi - mean) (A - mean)}."""
    cells = [tuple(cell) for cell in mask.nonzero().tolist()]
    mean_logprob = math.fsum(logprobs[cell].item() for cell in cells) / max(len(cells), 1)
    mean_advantage = math.fsum(advantages[cell].item() for cell in cells) / max(len(cells), 1)
    return {cell: (logprobs[cell].item() - mean_logprob) * (advantages[cell].item() - mean_advantage) for cell in cells}


# logprobs -1, -2, -3, -6 (mean -3); advantages 4, 2, 1, -3 (mean 1): covariances 2 * 3, 1 * 1, 0, -3 * -4
HAND = float64([[-1, -2, 9], [-3, -6, 9]]), float64([[4, 2, 9], [1, -3, 9]])
HAND_MASK = torch.tensor([[True, True, False], [True, True, False]])


def test_covariance_of_a_case_worked_by_hand():
    assert_close(covariance_of(*HAND, HAND_MASK), [[6, 1, 0], [0, 12, 0]])


def test_clip_cov_selects_tokens_between_its_bounds_that_are_not_clipped():
    logprobs, advantages = HAND

    def selected_tokens(objective, old=logprobs):
        return selected(objective, logprobs, old, advantages, HAND_MASK, seeded()).int().tolist()

    assert selected_tokens(ClipCovLoss(fraction=1.0, covariance_low=0.5, covariance_high=7.0)) == [[1, 1, 0], [0, 0, 0]]
    assert selected_tokens(ClipCovLoss(fraction=1.0, covariance_low=1.5, covariance_high=20.0)) == [
        [1, 0, 0],
        [0, 1, 0],
    ]
    assert selected_tokens(ClipCovLoss(fraction=1.0, covariance_low=1.0, covariance_high=12.0)) == [
        [1, 0, 0],
        [0, 0, 0],
    ]
    assert selected_tokens(ClipCovLoss(fraction=1.0, covariance_low=50.0, covariance_high=60.0)) == [
        [0, 0, 0],
        [0, 0, 0],
    ]
    # The ratio of the first token is 2 with A = 4: clipped. That of the second is 2 too where the bound allows it.
    # That of the fourth is 2 with A = -3: only the dual clip binds it.
    old = logprobs - float64([[LN2, 0, 0], [0, LN2, 0]])
    wide = {"fraction": 1.0, "covariance_low": 0.5, "covariance_high": 20.0}
    assert selected_tokens(ClipCovLoss(**wide), old) == [[0, 1, 0], [0, 1, 0]]
    assert selected_tokens(ClipCovLoss(clip_range_high=1.5, **wide), old) == [[1, 1, 0], [0, 1, 0]]
    assert selected_tokens(ClipCovLoss(clip_range_high=1.5, dual_clip=1.9, **wide), old) == [[1, 1, 0], [0, 0, 0]]


def test_kl_cov_selects_the_largest_covariances():
    logprobs, advantages = HAND
    for fraction, expected in (
        (0.01, [[0, 0, 0], [0, 1, 0]]),  # at least one
        (0.49, [[0, 0, 0], [0, 1, 0]]),  # rounded down
        (0.5, [[1, 0, 0], [0, 1, 0]]),
        (0.75, [[1, 1, 0], [0, 1, 0]]),
        (1.0, [[1, 1, 0], [1, 1, 0]]),
    ):
        arguments = logprobs, logprobs, advantages, HAND_MASK, seeded()
        assert selected(KLCovLoss(fraction=fraction), *arguments).int().tolist() == expected


def test_losses_of_a_case_worked_by_hand():
    # ratios 2 and 1/2; A = 1: clipped 1.2, and 1/2; the first of each row is selected_tokens
    logprobs = float64([[LN2, -LN2], [LN2, -LN2]]).requires_grad_()
    old, advantages = torch.zeros(2, 2).double(), torch.ones(2, 2).double()
    selected_tokens = torch.tensor([[True, False], [False, True]])
    loss, diagnostics = ClipCovLoss()(logprobs, old, advantages, everywhere(selected_tokens), selected_tokens)
    assert_close(loss, [[0, -0.5], [-1.2, 0]])
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], [[0, -0.5], [0, 0]])
    assert_close(diagnostics["chosen_fraction"], [[1, 0], [0, 1]])
    assert_close(diagnostics["clip_fraction"], [[1, 0], [1, 0]])
    # -2 + 3 ln 2 and -1/2 + 3 ln 2; d|x| is the sign
    loss, diagnostics = KLCovLoss(kl_coef=3.0)(logprobs, old, advantages, everywhere(selected_tokens), selected_tokens)
    assert_close(loss, [[-2 + 3 * LN2, -0.5], [-2, -0.5 + 3 * LN2]])
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], [[1, -0.5], [-2, -3.5]])
    assert_close(diagnostics["chosen_fraction"], [[1, 0], [0, 1]])


def test_kl_cov_is_smooth_where_the_actor_has_not_moved():
    """|x| is x^2 / 0.002 + 0.0005 within 0.001 of 0: rounding errors of 1e-6 then weigh 1e-3, not 1."""
    old, here = float64([[-1.0, -1.0, -1.0, -1.0]]), torch.ones(1, 4).bool()
    logprobs = (old + float64([[0.0, 1e-6, -5e-4, 1e-3]])).requires_grad_()
    loss, _ = KLCovLoss()(logprobs, old, torch.zeros_like(old), here, here)
    assert_close(loss, [[0.0005, 0.0005 + 5e-10, 0.000625, 0.001]], rtol=1e-9)
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], [[0.0, 1e-3, -0.5, 1.0]], rtol=1e-9)


def test_kl_cov_penalizes_large_changes():
    logprobs = float64([[-60.0, -1.0]]).requires_grad_()
    loss, _ = KLCovLoss()(
        logprobs, float64([[-1, -60]]), float64([[0, 0]]), torch.ones(1, 2).bool(), torch.ones(1, 2).bool()
    )
    assert_close(loss, [[59, 59]])
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], [[-1, 1]])


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("clip_cov", ClipCovLoss(0.2, 0.2, 0.3, fraction=1.0, covariance_low=0.3, covariance_high=1.5)),
        ("kl_cov", KLCovLoss(fraction=0.2, kl_coef=0.3)),
    ],
)
def test_selection_loss_and_gradient_equal_those_of_verl(name, objective):
    inputs, expected = RECORDED["inputs"], RECORDED["verl"]["outputs"][name]
    mask = float64(inputs["mask"]).bool()
    logprobs = float64(inputs["logprobs"]).requires_grad_()
    arguments = logprobs, float64(inputs["old_logprobs"]), float64(inputs["advantages"]), mask
    with torch.no_grad():
        selected_tokens = selected(objective, *arguments, seeded())
    losses, diagnostics = objective(*arguments, selected_tokens)
    loss = losses[mask].mean()
    assert_close(loss, expected["loss"], rtol=1e-9, atol=0)
    assert_close(torch.autograd.grad(loss, logprobs)[0], expected["gradient"], rtol=1e-9, atol=1e-12)
    assert 0 < selected_tokens.sum() < mask.sum()
    if name == "clip_cov":
        fraction = expected["metrics"]["actor/pg_clipfrac"]
        assert_close(diagnostics["chosen_fraction"][mask].mean(), fraction, rtol=1e-8)


@properties
@given(mask=masks(), seed=seeds, fraction=st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_kl_cov_chooses_the_top_of_the_papers_covariances(mask, seed, fraction):
    new, old, advantages, _ = batch(mask, seed)
    selected_tokens = selected(KLCovLoss(fraction=fraction), new, old, advantages, mask, seeded())
    scores = covariances(new, advantages, mask)
    order = sorted(scores, key=scores.__getitem__, reverse=True)
    expected = order[: max(1, int(fraction * len(order)))]
    if len(order) != 2:  # the covariances of two tokens are equal
        assert {tuple(cell) for cell in selected_tokens.nonzero().tolist()} == set(expected)


@properties
@given(mask=masks(), seed=seeds, fraction=st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_clip_cov_samples_from_the_candidates_of_the_paper(mask, seed, fraction):
    new, old, advantages, _ = batch(mask, seed)
    objective = ClipCovLoss(0.2, 0.1, 0.4, fraction=fraction, covariance_low=0.1, covariance_high=1.0)
    selected_tokens = selected(objective, new, old, advantages, mask, seeded(seed))
    candidates = set()
    for cell, score in covariances(new, advantages, mask).items():
        ratio, a = math.exp(new[cell].item() - old[cell].item()), advantages[cell].item()
        bound = (a > 0 and ratio > 1.4) or (a < 0 and ratio < 0.9)
        if 0.1 < score < 1.0 and not bound:
            candidates.add(cell)
    cells = {tuple(cell) for cell in selected_tokens.nonzero().tolist()}
    assert cells <= candidates
    assert len(cells) == min(len(candidates), max(1, int(fraction * int(mask.sum()))))


def test_clip_cov_samples_candidates_uniformly():
    new, old, advantages, mask = batch(torch.ones(4, 5, dtype=torch.bool), 3)
    arguments = new, old, advantages, mask
    objective = ClipCovLoss(0.9, None, 9.0, fraction=0.1, covariance_low=0.0, covariance_high=9.0)
    candidates = covariance_of(new, advantages, mask) > 0
    generator, draws = seeded(), 500
    counts = sum(selected(objective, *arguments, generator).double() for _ in range(draws))
    expected = 2 / candidates.sum().item()
    error = math.sqrt(expected * (1 - expected) / draws)
    assert ((counts / draws)[candidates] - expected).abs().max() < 4 * error
    assert counts[~candidates].sum() == 0
    assert counts.sum() == 2 * draws


@pytest.mark.parametrize(
    "objective",
    [KLCovLoss(fraction=0.3), ClipCovLoss(0.2, 0.1, 0.4, fraction=1.0, covariance_low=0.1, covariance_high=1.0)],
)
@settings(properties, max_examples=25)
@given(mask=masks(min_rows=2), seed=seeds, cut=st.integers(1, 4))
def test_ranks_select_the_tokens_of_a_single_rank(objective, mask, seed, cut):
    arguments = batch(mask, seed)
    whole = selected(objective, *arguments, seeded())
    cut = min(cut, len(mask) - 1)

    def rank(rows, number):
        part = [tensor[rows] for tensor in arguments]
        return lambda ranks: selected(objective, *part, seeded(number), ranks)

    parts = over_ranks(rank(slice(None, cut), 1), rank(slice(cut, None), 2))
    if mask.sum() != 2:  # the covariances of two tokens are equal, and lots are drawn
        assert torch.cat(parts).tolist() == whole.tolist()


@settings(properties, max_examples=25)
@given(mask=masks(min_rows=2), seed=seeds)
def test_clip_cov_samples_its_share_over_all_ranks(mask, seed):
    arguments, bounds = batch(mask, seed), {"covariance_low": -1.0, "covariance_high": 1.0}
    candidates = selected(ClipCovLoss(fraction=1.0, **bounds), *arguments, seeded())

    def rank(rows, number):
        part = [tensor[rows] for tensor in arguments]
        return lambda ranks: selected(ClipCovLoss(fraction=0.3, **bounds), *part, seeded(number), ranks)

    selected_tokens = torch.cat(over_ranks(rank(slice(None, 1), 1), rank(slice(1, None), 2)))
    assert selected_tokens.sum() == min(candidates.sum(), max(1, math.floor(0.3 * mask.sum())))
    assert not (selected_tokens & ~candidates).any()


@pytest.mark.parametrize("count", [1, 7, 41, 80, 121])
def test_largest_of_numbers_of_any_magnitude(count):
    sizes = torch.logspace(-300, 300, 80, dtype=torch.float64)
    values = torch.cat([sizes, -sizes, torch.zeros(1)])[torch.randperm(161, generator=seeded())]
    selected_tokens = select_largest(values, values.isfinite(), count, seeded())
    assert sorted(values[selected_tokens].tolist()) == sorted(values.tolist())[-count:]


@properties
@given(seed=seeds, sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3), count=st.integers(1, 12))
def test_largest_over_ranks_have_the_requested_number_even_with_ties(seed, sizes, count):
    everything = torch.randint(-2, 3, (sum(sizes),), generator=seeded(seed)).double() * 0.5
    candidates = torch.rand(sum(sizes), generator=seeded(seed + 1)) > 0.3
    values, counts = everything.split(sizes), candidates.split(sizes)

    def rank(number):
        return lambda ranks: select_largest(values[number], counts[number], count, seeded(seed + 2 + number), ranks)

    selected_tokens = torch.cat(over_ranks(*(rank(number) for number in range(len(sizes)))))
    assert selected_tokens.sum() == min(count, candidates.sum())
    assert not (selected_tokens & ~candidates).any()
    if selected_tokens.any() and (candidates & ~selected_tokens).any():
        assert everything[selected_tokens].min() >= everything[candidates & ~selected_tokens].max()


@pytest.mark.parametrize("count", range(1, 13))
def test_integer_order_equals_that_of_the_numbers(count):
    ascending = [-math.inf, -1e308, -2.0, math.nextafter(-1, -2), -1.0, -5e-324, 0.0, 5e-324, 1.0, 2.0, 1e308, math.inf]
    order = torch.randperm(12, generator=seeded(count))
    selected_tokens = select_largest(float64(ascending)[order], everywhere(order), count, seeded())
    assert sorted(order[selected_tokens].tolist()) == list(range(12 - count, 12))


def test_both_zeros_are_equal():
    draws = [select_largest(float64([0.0, -0.0]), everywhere(torch.ones(2)), 1, seeded(i)) for i in range(40)]
    assert {tuple(draw.tolist()) for draw in draws} == {(True, False), (False, True)}


def test_equal_advantages_select_a_random_share_of_tokens():
    logprobs = -normal(10, 10, seed=0).abs()
    arguments = logprobs, logprobs, torch.ones(10, 10).double(), everywhere(logprobs)
    selected_tokens = [selected(KLCovLoss(fraction=0.05), *arguments, seeded(seed)) for seed in range(2)]
    assert [tokens.sum().item() for tokens in selected_tokens] == [5, 5]
    assert selected_tokens[0].tolist() != selected_tokens[1].tolist()


@pytest.mark.parametrize(
    "objective",
    [
        KLCovLoss(fraction=0.3),
        ClipCovLoss(fraction=0.3, covariance_low=0.0),
        ClipCovLoss(fraction=1.0, covariance_low=-1.0),  # 0, which the covariance is outside, lies between the bounds
    ],
)
@properties
@given(mask=masks(), seed=seeds)
def test_tokens_outside_the_mask_are_never_selected_and_have_no_effect(objective, mask, seed):
    *tensors, mask = batch(mask, seed)
    clean = selected(objective, *tensors, mask, seeded())
    dirty = selected(objective, *(with_garbage(tensor, mask) for tensor in tensors), mask, seeded())
    assert dirty.tolist() == clean.tolist()
    assert not (clean & ~mask).any()


def test_impossible_token_has_a_log_probability_of_minus_10000():
    # mean -2501.5, mean advantage 1
    logprobs, advantages = torch.tensor([[-math.inf, -1.0, -2.0, -3.0]]), torch.tensor([[-2.0, 1.0, 2.0, 3.0]])
    expected = [[-3 * -7498.5, 0, 2499.5, 2 * 2498.5]]
    assert_close(covariance_of(logprobs, advantages, everywhere(logprobs)), expected)
    selected_tokens = selected(KLCovLoss(fraction=0.5), logprobs, logprobs, advantages, everywhere(logprobs), seeded())
    assert selected_tokens.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("objective", [KLCovLoss(), ClipCovLoss()])
def test_batch_without_tokens_selects_none(objective):
    nothing = torch.zeros(2, 3)
    assert not selected(objective, nothing, nothing, nothing, nothing.bool(), seeded()).any()
    empty = torch.zeros(0, 3)
    assert selected(objective, empty, empty, empty, empty.bool(), seeded()).shape == (0, 3)


@properties
@given(mask=masks(), seed=seeds)
def test_clip_cov_takes_tokens_from_the_sum_and_not_from_the_denominator(mask, seed):
    arguments = batch(mask, seed)
    selected_tokens = mask & (normal(*mask.shape, seed=seed + 9) > 0)
    total = {}
    for name, (losses, _) in (
        ("ppo", ClippedPolicyLoss()(*arguments)),
        ("clip_cov", ClipCovLoss()(*arguments, selected_tokens)),
    ):
        total[name] = (losses * TokenMean().weights(mask)).sum() / TokenMean().denominator(mask)
    taken = ClippedPolicyLoss()(*arguments)[0][selected_tokens].sum() / mask.sum().clamp(min=1)
    assert_close(total["clip_cov"], total["ppo"] - taken, rtol=1e-9, atol=1e-12)


def test_defaults_equal_those_of_the_papers():
    assert ClipCovLoss() == ClipCovLoss(0.2, None, None, None, 2e-4, 1.0, 5.0)
    assert KLCovLoss() == KLCovLoss(2e-4, 1.0)


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (ClipCovLoss, {"clip_range": 0.0}, r"^clip_range must lie in \(0, 1\), got 0.0$"),
        (ClipCovLoss, {"fraction": 0.0}, r"^fraction must lie in \(0, 1\], got 0.0$"),
        (
            ClipCovLoss,
            {"covariance_low": 2.0, "covariance_high": 2.0},
            r"^covariance_low must be less than covariance_high, got 2.0 and 2.0$",
        ),
        (KLCovLoss, {"fraction": 1.1}, r"^fraction must lie in \(0, 1\], got 1.1$"),
        (KLCovLoss, {"kl_coef": 0.0}, r"^kl_coef must be positive, got 0.0$"),
    ],
)
def test_invalid_hyper_parameters_are_rejected(objective, arguments, message):
    with pytest.raises(ValueError, match=message):
        objective(**arguments)


# -- tokens of high entropy -------------------------------------------------------------------------------------------


def high_entropy(entropies, mask, fraction, seed=0, ranks=ONE_RANK):
    zeros = torch.zeros_like(entropies)
    loss = HighEntropyLoss(fraction=fraction)
    return selected(loss, zeros, zeros, zeros, mask, seeded(seed), ranks, entropies=entropies)


def test_high_entropy_selects_the_most_uncertain_tokens_of_the_whole_mini_batch():
    # 6 tokens in the mask, of which a third is 2: 0.9 and 0.8, both in the second response; 5.0 is padding.
    entropies = float64([[0.1, 0.7, 0.2, 5.0], [0.9, 0.8, 0.3, 5.0]])
    mask = torch.tensor([[True, True, True, False]] * 2)
    assert high_entropy(entropies, mask, 1 / 3).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
    assert high_entropy(entropies, mask, 0.01).int().sum() == 1
    assert torch.equal(high_entropy(entropies, mask, 1.0), mask)


@properties
@given(mask=masks(min_rows=2), seed=seeds, fraction=st.sampled_from([0.2, 0.5, 0.9]))
def test_high_entropy_selects_the_same_tokens_on_two_ranks_as_on_one(mask, seed, fraction):
    entropies = normal(*mask.shape, seed=seed).abs()
    half = len(mask) // 2
    whole = high_entropy(entropies, mask, fraction)
    parts = over_ranks(
        lambda ranks: high_entropy(entropies[:half], mask[:half], fraction, ranks=ranks),
        lambda ranks: high_entropy(entropies[half:], mask[half:], fraction, seed=1, ranks=ranks),
    )
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("number", range(3))
def test_high_entropy_mask_is_that_of_trl(number):
    case = golden("policy_masks")["high_entropy"][number]
    mask, entropies = float64(case["mask"]).bool(), float64(case["entropies"])
    assert torch.equal(high_entropy(entropies, mask, case["fraction"]), float64(case["keep"]).bool())
