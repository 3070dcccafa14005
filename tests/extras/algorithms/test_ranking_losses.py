"""Losses of rankings: Plackett and Luce's likelihood, also with ties, and the mean over all pairs."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.ranking_losses import AllPairsLoss, PlackettLuceLoss
from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

LOSSES = {
    "all pairs": AllPairsLoss(),
    "all pairs, centered": AllPairsLoss(PairwiseLoss(0.3)),
    "plackett luce": PlackettLuceLoss(),
    "plackett luce, centered": PlackettLuceLoss(0.3),
}


def plackett_luce(scores, ranks):
    """Probability of all orders that agree with the ranks, each a product of choices."""
    answers = [i for i, rank in enumerate(ranks) if rank > 0]
    total = 0.0
    for order in itertools.permutations(answers):
        if all(ranks[one] <= ranks[other] for one, other in itertools.combinations(order, 2)):
            choices = [math.exp(scores[i]) / sum(math.exp(scores[j]) for j in order[n:]) for n, i in enumerate(order)]
            total += math.prod(choices)
    return -math.log(total)


def all_pairs(scores, ranks):
    answers = [i for i, rank in enumerate(ranks) if rank > 0]
    pairs = [(i, j) for i in answers for j in answers if ranks[i] < ranks[j]]
    return sum(math.log(1 + math.exp(scores[j] - scores[i])) for i, j in pairs) / len(pairs)


def before_all_others(scores, first, others, steps=200_000):
    """Integral of Ma et al. 2021: over u in [0, 1] of the product of 1 - u^(w_i / w), w the weight of the others."""
    rest = sum(math.exp(scores[j]) for j in others)
    v = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    u = v**8  # du = 8 v^7 dv, without the steep start of small powers
    return float((torch.stack([1 - u ** (math.exp(scores[i]) / rest) for i in first]).prod(dim=0) * 8 * v**7).mean())


@st.composite
def rankings(draw, rows=3, answers=5):
    """Generate (rows, answers) ranks with ties and missing answers, each row with two ranks at least."""
    table = []
    for _ in range(rows):
        ranks = draw(st.lists(st.integers(0, 3), min_size=answers - 2, max_size=answers - 2))
        table.append(draw(st.permutations([1, 2, *ranks])))
    return torch.tensor(table)


def test_losses_of_a_case_worked_by_hand():
    # exp(s) is 4, 2, 1. First 4 of 7, then 2 of 3:  -ln(4/7 * 2/3) = ln(21/8)
    # pairs 4:2, 4:1, 2:1:                           (ln(6/4) + ln(5/4) + ln(3/2)) / 3
    # worst first, 1 of 7, then 2 of 6:              ln 21,  (ln 5 + ln 3 + ln 3) / 3
    # the first two tied, then 1: in either order    4/7 * 2/3 + 2/7 * 4/5 = 64/105;  (ln 5/4 + ln 3/2) / 2
    # the last two tied: 4 of 7                      ln(7/4);  (ln 6/4 + ln 5/4) / 2
    # two answers, 4 and 2:                          ln(6/4)
    scores = float64([[4, 2, 1]] * 5).log()
    ranks = torch.tensor([[1, 2, 3], [3, 2, 1], [1, 1, 2], [1, 2, 2], [1, 2, 0]])
    ln = math.log
    expected = [ln(21 / 8), ln(21), ln(105 / 64), ln(7 / 4), ln(1.5)]
    assert_close(PlackettLuceLoss()(scores, ranks), expected, rtol=1e-12)
    expected = [(2 * ln(1.5) + ln(1.25)) / 3, (ln(5) + 2 * ln(3)) / 3, ln(1.875) / 2, ln(1.875) / 2, ln(1.5)]
    assert_close(AllPairsLoss()(scores, ranks), expected, rtol=1e-12)
    # mean score ln 8 / 3 of three answers, and ln 8 / 2 of two
    centered = PlackettLuceLoss(center_coef=0.5)(scores, ranks) - PlackettLuceLoss()(scores, ranks)
    assert_close(centered, [0.5 * (2 * ln(8) / 3) ** 2] * 4 + [0.5 * ln(8) ** 2], rtol=1e-12)


@properties
@given(seeds, rankings())
def test_losses_equal_the_loops_of_their_papers(seed, ranks):
    scores = 2 * normal(*ranks.shape, seed=seed)
    rows = list(zip(scores.tolist(), ranks.tolist(), strict=True))
    assert_close(PlackettLuceLoss()(scores, ranks), [plackett_luce(*row) for row in rows], rtol=1e-9)
    assert_close(AllPairsLoss()(scores, ranks), [all_pairs(*row) for row in rows], rtol=1e-9)


@pytest.mark.parametrize("tied", [2, 3, 5])
def test_ties_equal_the_integral_of_partitioned_preferences(tied):
    scores = normal(tied + 3, seed=tied)
    ranks = torch.tensor([1] * tied + [2] * 3)
    probability = before_all_others(scores.tolist(), range(tied), range(tied, tied + 3))
    assert_close(PlackettLuceLoss()(scores[None], ranks[None]), [-math.log(probability)], rtol=1e-6)


@pytest.mark.parametrize("case", golden("rankings")["cases"])
def test_losses_equal_the_likelihoods_of_choix(case):
    scores = float64([case["inputs"]["scores"]])
    ranks = torch.zeros(scores.shape, dtype=torch.long)
    for rank, answer in enumerate(case["inputs"]["best_to_worst"], start=1):
        ranks[0, answer] = rank
    outputs = case["outputs"]
    assert_close(PlackettLuceLoss()(scores, ranks), [-outputs["log_likelihood_rankings"]], rtol=1e-12)
    assert_close(AllPairsLoss()(scores, ranks), [-outputs["log_likelihood_pairwise"] / outputs["pairs"]], rtol=1e-12)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_answers_have_the_loss_of_their_pair_to_the_bit(loss, dtype):
    pair = PairwiseLoss(0.3 if loss in (LOSSES["all pairs, centered"], LOSSES["plackett luce, centered"]) else 0.0)
    chosen, rejected = (4 * normal(50, seed=seed, dtype=dtype) for seed in (1, 2))
    ranks = torch.tensor([[1, 2]]).expand(50, 2)
    scores = torch.stack([chosen, rejected], dim=1).requires_grad_()
    (ours,) = torch.autograd.grad(loss(scores, ranks).sum(), scores)
    same = torch.stack([chosen, rejected], dim=1).requires_grad_()
    (expected,) = torch.autograd.grad(pair(*same.unbind(dim=1)).sum(), same)
    assert torch.equal(loss(scores, ranks), pair(chosen, rejected))
    assert torch.equal(loss(scores.flip(1), ranks.flip(1)), pair(chosen, rejected))
    assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["all pairs, centered", "plackett luce, centered"])
@properties
@given(seeds, rankings())
def test_padding_order_of_answers_and_names_of_ranks_change_nothing(name, seed, ranks):
    loss = LOSSES[name]
    scores = normal(*ranks.shape, seed=seed)
    expected = loss(scores, ranks)
    order = torch.randperm(ranks.shape[1], generator=torch.Generator().manual_seed(seed))
    assert_close(loss(scores[:, order], ranks[:, order]), expected)
    assert_close(loss(scores, torch.where(ranks > 0, 10 * ranks, 0)), expected)
    garbage = torch.where(ranks > 0, scores, 1e6)
    wide = (torch.nn.functional.pad(garbage, (0, 2), value=-1e6), torch.nn.functional.pad(ranks, (0, 2)))
    assert_close(loss(*wide), expected)


@pytest.mark.parametrize("name", ["all pairs", "plackett luce"])
@properties
@given(seeds, rankings())
def test_gradient_is_finite_sums_to_zero_and_is_zero_without_an_answer(name, seed, ranks):
    scores = (3 * normal(*ranks.shape, seed=seed)).requires_grad_()
    LOSSES[name](scores, ranks).sum().backward()
    assert scores.grad.isfinite().all()
    assert_close(scores.grad.sum(dim=1), torch.zeros(len(ranks)), atol=1e-9)  # only differences of scores count
    assert (scores.grad[ranks == 0] == 0).all()
    best_only = (ranks == 1) & ((ranks == 1).sum(dim=1, keepdim=True) == 1)
    assert (scores.grad[best_only] < 0).all()  # a higher score of the best answer lowers the loss


@pytest.mark.parametrize("tied", [1, 2, 3])
def test_probabilities_of_all_ways_to_be_first_sum_to_one(tied):
    scores = normal(5, seed=3)
    losses = []
    for first in itertools.combinations(range(5), tied):
        ranks = torch.tensor([[1 if i in first else 2 for i in range(5)]])
        losses.append(PlackettLuceLoss()(scores[None], ranks))
    assert_close(torch.cat(losses).neg().exp().sum(), 1.0)


@pytest.mark.parametrize("loss", [AllPairsLoss(), PlackettLuceLoss()])
def test_huge_differences_stay_finite(loss):
    scores = torch.tensor([[1e4, -1e4, 0.0, 5.0], [-1e4, 1e4, 3.0, 3.0]], requires_grad=True)
    losses = loss(scores, torch.tensor([[1, 3, 2, 2], [1, 2, 1, 2]]))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert scores.grad.isfinite().all()


def test_many_ties_above_others_are_rejected_before_the_run():
    PlackettLuceLoss().check([1] * 10 + [2] * 40)
    AllPairsLoss().check([1] * 11 + [2])
    with pytest.raises(ValueError, match=r"11 tied answers above others.*at most 10: use AllPairsLoss"):
        PlackettLuceLoss().check([1] * 11 + [2])


def test_negative_weight_is_rejected():
    with pytest.raises(ValueError, match=r"^center_coef must be at least 0, got -0.1$"):
        PlackettLuceLoss(center_coef=-0.1)
