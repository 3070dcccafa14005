import math

import torch
from hypothesis import given

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.modules.metrics import MeanAccumulator
from tests.helpers import assert_close, masks, normal, over_ranks, properties, seeds


@properties
@given(masks(), seeds)
def test_mean_is_independent_of_the_division_of_values(mask, seed):
    values = normal(*mask.shape, seed=seed)
    whole, parts, merged = MeanAccumulator(), MeanAccumulator(), MeanAccumulator()
    whole.add("x", values, mask)
    for row, wanted in zip(values, mask, strict=True):
        parts.add("x", row, wanted)
        part = MeanAccumulator()
        part.add("x", row, wanted)
        merged.merge(part)
    if mask.any():
        assert_close(whole.means(ONE_RANK)["x"], values[mask].mean())
        assert_close(parts.means(ONE_RANK)["x"], whole.means(ONE_RANK)["x"])
        assert_close(merged.means(ONE_RANK)["x"], whole.means(ONE_RANK)["x"])
    else:
        assert all(math.isnan(sums.means(ONE_RANK)["x"]) for sums in (whole, parts, merged))


def test_means_are_exact_over_ranks_with_different_counts():
    def rank(values):
        def run(ranks):
            sums = MeanAccumulator()
            sums.add("x", torch.tensor(values))
            sums.add("nothing", torch.tensor([]))
            return sums.means(ranks)

        return run

    for means in over_ranks(rank([1.0]), rank([2.0, 6.0])):
        assert means["x"] == 3.0
        assert math.isnan(means["nothing"])  # and not its last value


def test_tokens_are_all_rejected_only_if_they_are_on_all_ranks():
    def rank(accepted, mask):
        def run(ranks):
            sums = MeanAccumulator()
            sums.add_rejected(torch.tensor(accepted), torch.tensor(mask))
            return sums.all_rejected(ranks)

        return run

    nothing, rejected = rank([False, False], [False, False]), rank([False, False], [True, True])
    accepted = rank([False, True], [True, True])
    assert over_ranks(rejected, rejected) == over_ranks(rejected, nothing) == [True, True]
    assert over_ranks(rejected, accepted) == over_ranks(nothing, nothing) == [False, False]


def test_empty_sum_needs_no_reduction():
    class Never(DataRanks):
        def sum(self, value):
            raise AssertionError("reduced")

    assert MeanAccumulator().means(Never()) == {}
    assert not MeanAccumulator().all_rejected(Never())


def test_small_values_are_not_lost_next_to_large_ones():
    sums = MeanAccumulator()
    sums.add("x", torch.tensor([1e8]))
    for _ in range(100):
        sums.add("x", torch.tensor([1.0]))
    assert math.isclose(sums.means(ONE_RANK)["x"], (1e8 + 100) / 101, rel_tol=1e-12)


def test_metrics_keep_no_graph():
    sums = MeanAccumulator()
    sums.add("x", torch.ones(2, requires_grad=True) * 2)
    assert not any(part.requires_grad for part in sums._totals.values())
