"""A loader that stops anywhere and goes on at the next batch."""

import pytest
import torch

from lightning_rlhf.data.resumable import EpochOrder, ResumableLoader


def loader(shuffle=True, rows=11):
    letters = [chr(ord("a") + i) for i in range(rows)]
    return ResumableLoader(
        letters, 2, lambda rows, numbers, places, epoch: (epoch, rows, numbers), seed=3, shuffle=shuffle
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
    with pytest.raises(ValueError, match="1 rows make no batch of 2"):
        loader(rows=1)
