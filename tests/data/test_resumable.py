"""A data loader that can stop at any batch and resume with the next one."""

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
def test_loaded_state_resumes_with_the_next_batch_and_continues_with_whole_epochs(read):
    whole = [epoch(loader(), number) for number in (2, 3)]
    stopped = loader()
    stopped.batch_sampler.sampler.set_epoch(2)
    batches = iter(stopped)
    first = [next(batches) for _ in range(read)]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert first + epoch(resumed, 2) == whole[0]
    assert epoch(resumed, 3) == whole[1]


def test_finished_epoch_is_followed_by_the_start_of_the_next():
    finished = loader()
    epoch(finished, 0)
    resumed = loader()
    resumed.load_state_dict(finished.state_dict())
    assert epoch(resumed, 1) == epoch(loader(), 1)


def test_every_epoch_has_whole_batches_without_repeated_rows_in_a_different_order():
    orders = []
    for number in range(4):
        batches = epoch(loader(), number)
        assert len(batches) == len(loader()) == 5
        orders.append([row for _, rows, _ in batches for row in rows])
        assert len(set(orders[-1])) == 10
        assert {e for e, _, _ in batches} == {number}
    assert len({tuple(order) for order in orders}) == 4


def test_batches_have_the_row_numbers():
    for _, rows, numbers in epoch(loader(), 0):
        assert rows == [chr(ord("a") + i) for i in numbers]


def test_order_without_shuffling_is_that_of_the_data():
    assert [numbers for _, _, numbers in epoch(loader(shuffle=False), 5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_reading_does_not_change_the_global_random_state():
    before = torch.get_rng_state()
    epoch(loader(), 0)
    assert torch.get_rng_state().equal(before)


def test_order_depends_only_on_seed_and_epoch():
    orders = {(seed, number): tuple(EpochOrder(9, seed, True)) for seed in (1, 2) for number in (0,)}
    assert orders[1, 0] != orders[2, 0]
    torch.manual_seed(5)
    assert tuple(EpochOrder(9, 1, True)) == orders[1, 0]


def test_fewer_rows_than_a_batch_are_rejected():
    with pytest.raises(ValueError, match="batch_size is 2, but the training data have only 1 usable rows"):
        loader(rows=1)


LENGTHS = [1, 9, 2, 8, 3, 7, 4, 6, 5, 1, 9]


def of_rank(rank, ranks, size=4):
    """Return the loader of one rank, whose batches are row numbers and positions."""
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
def test_ranks_together_read_the_batches_of_one_rank_with_each_row_at_its_position(ranks):
    for number in (0, 1):
        shares = [epoch(of_rank(rank, ranks), number) for rank in range(ranks)]
        for batch, (numbers, positions) in enumerate(epoch(of_rank(0, 1), number)):
            assert positions == [0, 1, 2, 3]
            dealt = {position: row for share in shares for row, position in zip(*share[batch], strict=True)}
            assert [dealt[position] for position in positions] == numbers
            assert all(share[batch][0] for share in shares)


def test_position_is_independent_of_the_number_of_ranks():
    first = iter(of_rank(1, 2))
    next(first)
    state = {"batches": 1}
    resumed = [of_rank(rank, 4) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(state)
    rest = [row for loader in resumed for numbers, _ in epoch(loader, 0) for row in numbers]
    assert sorted(rest) == sorted(epoch(of_rank(0, 1), 0)[1][0])


def test_batch_that_leaves_a_rank_without_rows_is_rejected():
    with pytest.raises(ValueError, match="batch_size is 4, but each of 5 ranks needs a row"):
        of_rank(0, 5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 5, 8, 9, 11])
def test_held_out_rows_appear_once_and_every_rank_has_one_in_each_batch(rows, ranks):
    shares = [list(HeldOutBatches(rows, 4, rank, ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(HeldOutBatches(rows, 4, 0, ranks))}
    assert all(batch for share in shares for batch in share)
    together = [sorted(row for batch in batches for row in batch) for batches in zip(*shares, strict=True)]
    assert [row for batch in together for row in batch] == list(range(rows))
    assert all(2 <= len(batch) <= 4 + max(ranks, 2) - 1 for batch in together)


def test_held_out_batches_of_one_rank_equal_those_of_a_loader_except_for_a_single_last_row():
    assert list(HeldOutBatches(10, 4, 0, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(HeldOutBatches(9, 4, 0, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert list(HeldOutBatches(3, 1, 0, 1)) == [[0], [1], [2]]
    assert list(HeldOutBatches(1, 4, 0, 1)) == [[0]]


def test_fewer_held_out_rows_than_ranks_are_rejected():
    with pytest.raises(ValueError, match="there are 2 validation rows, but each of 3 ranks needs one: use at least 3"):
        HeldOutBatches(2, 4, 0, 3)


@pytest.mark.parametrize("strategy", ["rlhf_ddp", "rlhf_fsdp"])
def test_trainer_that_replaces_the_sampler_is_rejected_with_the_option_to_set(strategy):
    data = module_of(PromptDataModule, {"prompt": "a"})
    options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False}
    data.trainer = quiet_trainer(**options)
    with pytest.raises(ValueError, match=r"^PromptDataModule splits .* set Trainer\(use_distributed_sampler=False\)$"):
        data.setup("fit")
    data.trainer = quiet_trainer(**options, use_distributed_sampler=False)
    data.setup("fit")
