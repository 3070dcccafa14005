"""A loader that stops anywhere and goes on at the next batch."""

import pytest
import torch

from lightning_rlhf import PromptDataModule
from lightning_rlhf.data.resumable import EpochOrder, HeldOutBatches, ResumableLoader
from tests.data.rows_given import module_of
from tests.stand_ins import quiet_trainer


def loader(shuffle=True, rows=11):
    letters = [chr(ord("a") + i) for i in range(rows)]
    return ResumableLoader(
        letters, 2, lambda rows, numbers, positions, epoch: (epoch, rows, numbers), seed=3, shuffle=shuffle
    )


def epoch(loader, number):
    loader.batch_sampler.sampler.set_epoch(number)
    return list(loader)


@pytest.mark.parametrize("read", range(1, 5))
def test_a_loader_that_takes_over_the_state_goes_on_with_the_next_batch_and_then_with_whole_epochs(read):
    whole = [epoch(loader(), number) for number in (2, 3)]
    stopped = loader()
    stopped.batch_sampler.sampler.set_epoch(2)
    batches = iter(stopped)
    first = [next(batches) for _ in range(read)]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert first + epoch(resumed, 2) == whole[0]
    assert epoch(resumed, 3) == whole[1]


def test_a_finished_epoch_is_followed_by_the_next_from_its_beginning():
    finished = loader()
    epoch(finished, 0)
    resumed = loader()
    resumed.load_state_dict(finished.state_dict())
    assert epoch(resumed, 1) == epoch(loader(), 1)


def test_every_epoch_has_whole_batches_of_each_row_at_most_once_in_an_order_of_its_own():
    orders = []
    for number in range(4):
        batches = epoch(loader(), number)
        assert len(batches) == len(loader()) == 5
        orders.append([row for _, rows, _ in batches for row in rows])
        assert len(set(orders[-1])) == 10
        assert {e for e, _, _ in batches} == {number}
    assert len({tuple(order) for order in orders}) == 4


def test_rows_come_with_their_numbers():
    for _, rows, numbers in epoch(loader(), 0):
        assert rows == [chr(ord("a") + i) for i in numbers]


def test_without_shuffling_the_order_is_that_of_the_data():
    assert [numbers for _, _, numbers in epoch(loader(shuffle=False), 5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_reading_leaves_the_global_random_generator_alone():
    before = torch.get_rng_state()
    epoch(loader(), 0)
    assert torch.get_rng_state().equal(before)


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {(seed, number): tuple(EpochOrder(9, seed, True)) for seed in (1, 2) for number in (0,)}
    assert orders[1, 0] != orders[2, 0]
    torch.manual_seed(5)
    assert tuple(EpochOrder(9, 1, True)) == orders[1, 0]


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size is 2, but the training data have only 1 usable rows"):
        loader(rows=1)


LENGTHS = [1, 9, 2, 8, 3, 7, 4, 6, 5, 1, 9]


def of_rank(rank, ranks, size=4):
    """Return a loader of one rank's share that says numbers and places."""
    rows = list(range(11))
    return ResumableLoader(
        rows,
        size,
        lambda _, numbers, positions, __: (numbers, positions),
        seed=3,
        lengths=LENGTHS,
        rank=rank,
        ranks=ranks,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ranks_together_read_the_batches_of_one_rank_each_row_at_its_place(ranks):
    for number in (0, 1):
        shares = [epoch(of_rank(rank, ranks), number) for rank in range(ranks)]
        for batch, (numbers, positions) in enumerate(epoch(of_rank(0, 1), number)):
            assert positions == [0, 1, 2, 3]
            dealt = {position: row for share in shares for row, position in zip(*share[batch], strict=True)}
            assert [dealt[position] for position in positions] == numbers
            assert all(share[batch][0] for share in shares)


def test_a_position_means_the_same_on_any_number_of_ranks():
    first = iter(of_rank(1, 2))
    next(first)
    state = {"batches": 1}
    resumed = [of_rank(rank, 4) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(state)
    rest = [row for loader in resumed for numbers, _ in epoch(loader, 0) for row in numbers]
    assert sorted(rest) == sorted(epoch(of_rank(0, 1), 0)[1][0])


def test_a_batch_that_leaves_a_rank_without_a_row_is_refused():
    with pytest.raises(ValueError, match="batch_size is 4, but each of 5 ranks needs a row"):
        of_rank(0, 5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 5, 8, 9, 11])
def test_held_out_rows_come_once_and_every_rank_has_one_in_every_batch(rows, ranks):
    shares = [list(HeldOutBatches(rows, 4, rank, ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(HeldOutBatches(rows, 4, 0, ranks))}
    assert all(batch for share in shares for batch in share)
    together = [sorted(row for batch in batches for row in batch) for batches in zip(*shares, strict=True)]
    assert [row for batch in together for row in batch] == list(range(rows))
    assert all(2 <= len(batch) <= 4 + max(ranks, 2) - 1 for batch in together)


def test_alone_held_out_batches_are_what_a_loader_would_make_but_none_is_of_one_row_unless_all_are():
    assert list(HeldOutBatches(10, 4, 0, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(HeldOutBatches(9, 4, 0, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert list(HeldOutBatches(3, 1, 0, 1)) == [[0], [1], [2]]
    assert list(HeldOutBatches(1, 4, 0, 1)) == [[0]]


def test_fewer_held_out_rows_than_ranks_are_refused():
    with pytest.raises(ValueError, match="there are 2 validation rows, but each of 3 ranks needs one: use at least 3"):
        HeldOutBatches(2, 4, 0, 3)


@pytest.mark.parametrize("strategy", ["rlhf_ddp", "rlhf_fsdp"])
def test_a_trainer_that_would_replace_the_sampler_is_refused_with_the_remedy(strategy):
    data = module_of(PromptDataModule, {"prompt": "a"})
    options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False}
    data.trainer = quiet_trainer(**options)
    with pytest.raises(ValueError, match=r"^PromptDataModule splits .* set Trainer\(use_distributed_sampler=False\)$"):
        data.setup("fit")
    data.trainer = quiet_trainer(**options, use_distributed_sampler=False)
    data.setup("fit")
