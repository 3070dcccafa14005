import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean, TokenSum
from tests.helpers import assert_close, float64, golden, masks, normal, over_ranks, pad_columns, properties, seeds

AGGREGATIONS = [TokenMean(), TokenSum(), SequenceMeanTokenSum(), SequenceMeanTokenSum(4.0), SequenceMeanTokenMean()]
aggregations = st.sampled_from(AGGREGATIONS)
VERLS = {
    "token-mean": TokenMean(),
    "token-sum": TokenSum(),
    "seq-mean-token-sum": SequenceMeanTokenSum(),
    "seq-mean-token-sum-norm": SequenceMeanTokenSum(scale=20),
    "seq-mean-token-mean": SequenceMeanTokenMean(),
}


def aggregate(aggregation, losses, mask):
    return (aggregation.weights(mask) * losses.masked_fill(~mask, 0)).sum() / aggregation.denominator(mask)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # losses 1, 2, 3 | 6 | none: three responses, of 3, 1 and 0 tokens
        (TokenMean(), 3),  # 12 / 4
        (TokenSum(), 12),
        (SequenceMeanTokenSum(), 6),  # (6 + 6) / 2
        (SequenceMeanTokenSum(4), 1.5),  # 6 / 4
        (SequenceMeanTokenMean(), 4),  # (2 + 6) / 2
    ],
)
def test_losses_of_a_case_worked_by_hand(aggregation, expected):
    losses = float64([[1, 2, 3], [6, torch.nan, torch.inf], [torch.nan, -torch.inf, 9]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert_close(aggregate(aggregation, losses, mask), expected, rtol=1e-12)


def by_loops(aggregation, losses, mask):
    """Return the loss from the papers: DAPO's eq. 12, Dr. GRPO's section 3.2, DeepSeekMath's eq. 3; skip empty
    responses."""
    responses = [
        [loss for loss, counts in zip(row, marks, strict=True) if counts]
        for row, marks in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    responses = [response for response in responses if response]
    if not responses:
        return 0.0
    sums = [math.fsum(response) for response in responses]
    if isinstance(aggregation, TokenMean):
        return math.fsum(sums) / sum(len(response) for response in responses)
    if isinstance(aggregation, TokenSum):
        return math.fsum(sums)
    if isinstance(aggregation, SequenceMeanTokenMean):
        sums = [total / len(response) for total, response in zip(sums, responses, strict=True)]
        return math.fsum(sums) / len(sums)
    return math.fsum(sums) / len(sums) / aggregation.scale


@properties
@given(aggregations, masks(), seeds)
def test_losses_follow_the_papers(aggregation, mask, seed):
    losses = normal(*mask.shape, seed=seed)
    assert_close(aggregate(aggregation, losses, mask), by_loops(aggregation, losses, mask), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("responses", ["full", "one_empty"])
@pytest.mark.parametrize("mode", VERLS)
def test_losses_and_gradients_equal_those_of_verl(mode, responses):
    record = golden("corrections")
    expected = record["outputs"]["aggregation"][mode][responses]
    mask = float64(record["inputs"]["mask"]).bool()
    if responses == "one_empty":
        mask[1] = False
    losses = float64(record["inputs"]["losses"]).requires_grad_()
    loss = aggregate(VERLS[mode], losses, mask)
    loss.backward()
    # verl divides the mean over tokens of a response by their count + 1e-8
    assert_close(loss, expected["loss"], rtol=1e-8)
    assert_close(losses.grad, expected["gradient"], rtol=1e-7, atol=1e-12)


@properties
@given(aggregations, masks(min_rows=2), seeds, st.integers(1, 4))
def test_micro_batches_change_neither_loss_nor_gradient(aggregation, mask, seed, rows):
    parameter = normal(seed=seed).requires_grad_()
    factors = normal(*mask.shape, seed=seed + 1)
    (whole,) = torch.autograd.grad(aggregate(aggregation, parameter.exp() * factors, mask), parameter)
    denominator = aggregation.denominator(mask)
    for part, of_part in zip(factors.split(rows), mask.split(rows), strict=True):
        losses = (parameter.exp() * part).masked_fill(~of_part, 0)
        ((losses * aggregation.weights(of_part)).sum() / denominator).backward()
    assert_close(parameter.grad, whole, rtol=1e-9, atol=1e-12)


@properties
@given(aggregations, masks(min_rows=2), seeds, st.integers(0, 5))
def test_ranks_change_nothing_including_empty_ones(aggregation, mask, seed, first):
    losses = normal(*mask.shape, seed=seed)

    def rank(rows):
        def share(ranks):
            total = (losses[rows].masked_fill(~mask[rows], 0) * aggregation.weights(mask[rows])).sum()
            return total / aggregation.denominator(mask[rows], ranks)

        return share

    shares = over_ranks(rank(slice(first)), rank(slice(first, None)))
    assert_close(sum(shares), aggregate(aggregation, losses, mask), rtol=1e-9, atol=1e-12)


@properties
@given(aggregations, masks(), seeds)
def test_padding_and_the_order_of_responses_change_nothing(aggregation, mask, seed):
    losses = normal(*mask.shape, seed=seed)
    whole = aggregate(aggregation, losses, mask)
    assert_close(aggregate(aggregation, pad_columns(losses, 3), pad_columns(mask, 3)), whole, rtol=1e-12, atol=1e-14)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    assert_close(aggregate(aggregation, losses[order], mask[order]), whole, rtol=1e-12, atol=1e-14)
    assert_close(aggregation.weights(mask[order]), aggregation.weights(mask)[order])


@properties
@given(aggregations, masks(), seeds)
def test_responses_without_a_token_do_not_count(aggregation, mask, seed):
    losses = normal(*mask.shape, seed=seed)
    emptied = torch.cat([mask, torch.zeros_like(mask)])
    whole = aggregate(aggregation, losses, mask)
    assert_close(aggregate(aggregation, torch.cat([losses, losses]), emptied), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_empty_batch_has_loss_0_and_not_nan(aggregation, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    losses = torch.full(shape, torch.nan, requires_grad=True)
    loss = aggregate(aggregation, losses, mask)
    loss.backward()
    assert loss == 0
    assert (losses.grad == 0).all()
    assert aggregation.denominator(mask) > 0


@pytest.mark.parametrize(("aggregation", "of_each_rank"), [(TokenMean(), 6), (SequenceMeanTokenMean(), 2)])
def test_counts_are_exact_beyond_single_precision(aggregation, of_each_rank):
    mask, ranks = torch.ones(2, 3, dtype=torch.bool), 2**24 + 1

    class Many(DataRanks):
        def sum(self, value):
            return value * ranks

    assert aggregation.denominator(mask, Many()) == of_each_rank * ranks
    assert aggregation.weights(mask).dtype == torch.float64


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_single_token_is_divided_only_by_the_scale(aggregation):
    denominator = aggregation.denominator(torch.tensor([[True, False]]))
    assert denominator == getattr(aggregation, "scale", 1.0)
    assert denominator.dtype == torch.float64


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_non_positive_scale_is_rejected(scale):
    with pytest.raises(ValueError, match=rf"^scale must be positive and finite, got {scale}$"):
        SequenceMeanTokenSum(scale)
