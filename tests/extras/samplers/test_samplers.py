"""Sampling orders other than a shuffle: equal for the same seed and epoch, and resumable within an epoch."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.resumable import SamplerOrder
from lightning_rlhf.data.samplers import Sampler, shuffle
from lightning_rlhf.extras.samplers.curriculum import Curriculum
from lightning_rlhf.extras.samplers.mixture import Mixture
from tests.data.rows_given import GivenRows, Letters, error_of, module_of
from tests.helpers import properties
from tests.stand_ins import each

HARD = [3, 1, 2, 1, 5, 4, 1, 0]


def orders(sampler, keys, lengths=None, epochs=3, seed=1):
    return [list(sampler.order(keys, lengths or [1] * len(keys), seed, epoch)) for epoch in range(epochs)]


def test_easy_rows_come_first_and_later_epochs_are_shuffled():
    levels = HARD * 3
    first, second, third = orders(Curriculum("level", epochs=2), levels)
    assert [levels[row] for row in first] == [levels[row] for row in second] == sorted(levels)
    assert first != second  # equal ones change places
    assert third == shuffle(24, 1, 2)
    assert [HARD[row] for row in orders(Curriculum("level", descending=True), HARD)[0]] == sorted(HARD, reverse=True)


def test_short_rows_come_first_without_a_column():
    assert [HARD[row] for row in orders(Curriculum(), [None] * 8, HARD)[0]] == sorted(HARD)


KEYS = ["a"] * 6 + ["b"] * 2


def test_sources_are_mixed_by_weight_throughout_an_epoch():
    for order in orders(Mixture({"a": 1, "b": 3}, rows=40), KEYS):
        drawn = [KEYS[row] for row in order]
        for end in range(1, 41):
            assert abs(drawn[:end].count("b") - 0.75 * end) <= 1
        assert Counter(order[i] for i, name in enumerate(drawn) if name == "b") == {6: 15, 7: 15}


def test_rarely_sampled_source_gives_different_rows_in_different_epochs():
    result = [[row for row in order if row < 6] for order in orders(Mixture({"a": 1, "b": 3}), KEYS, epochs=6)]
    assert {len(rows) for rows in result} == {2}
    assert len({tuple(rows) for rows in result}) > 2


@properties
@given(st.integers(0, 99), st.integers(0, 5), st.sampled_from([Curriculum("x"), Mixture({1: 1.0, 2: 0.5}, rows=9)]))
def test_order_is_a_function_of_seed_and_epoch(seed, epoch, sampler):
    keys = [1, 2, 1, 2, 2, 1, 1]
    again = sampler.order(keys, [1] * 7, seed, epoch)
    assert list(sampler.order(keys, [1] * 7, seed, epoch)) == list(again)
    assert set(again) <= set(range(7))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"weights": {}}, "weights must be positive and not empty"),
        ({"weights": {"a": 0.0}}, "weights must be positive and not empty, got {'a': 0.0}"),
        ({"weights": {"a": 1.0}, "rows": 0}, "rows must be at least 1 or null, got 0"),
    ],
)
def test_invalid_mixtures_are_rejected(inputs, reason):
    with pytest.raises(ValueError, match=reason):
        Mixture(**inputs)


def test_weight_without_rows_and_row_without_weight_or_column_raise():
    with pytest.raises(ValueError, match="Mixture has a weight for 'c', but no row has this source"):
        Mixture({"a": 1, "c": 1}).order(["a"], [1], 0, 0)
    row = {"prompt": "why", "data_source": "b"}
    output = error_of(PromptDataModule, row, sampler=Mixture({"a": 1}))
    assert "given:1: the source 'b' has no weight; Mixture has weights for ['a']" in output
    assert "Mixture needs a column source or data_source" in error_of(
        PromptDataModule, {"prompt": "why"}, sampler=Mixture({"a": 1})
    )
    assert "given:1: no column 'level'" in error_of(PromptDataModule, row, sampler=Curriculum("level"))


@pytest.mark.parametrize("column", ["source", "data_source", "extra_info.kind"])
def test_source_is_read_from_the_columns_that_the_rest_of_a_run_reads_or_from_the_named_one(column):
    name, _, key = column.partition(".")
    rows = [{"prompt": "why", name: {key: each} if key else each} for each in "aab"]
    data = module_of(PromptDataModule, *rows, batch_size=3, sampler=Mixture({"a": 2, "b": 1}, column if key else None))
    assert data.reports["train"].used == 3


ROWS = [{"prompt": "a" * (8 - level), "extra_info": {"level": level}} for level in HARD]


def module(sampler, bad=()):
    return module_of(PromptDataModule, *bad, *ROWS, batch_size=2, sampler=sampler, shuffle=True, on_bad_row="skip")


def numbers(loader, epoch):
    loader.batch_sampler.sampler.set_epoch(epoch)
    return [each(batch, "index") for batch in loader]


def test_data_module_serves_the_order_of_its_sampler_with_bad_rows_present():
    loader = module(Curriculum("extra_info.level"), bad=[{"extra_info": {"level": 9}}]).train_dataloader()
    served = [row for batch in numbers(loader, 0) for row in batch]
    assert [HARD[row] for row in served] == sorted(HARD)
    by_length = module(Curriculum()).train_dataloader()
    served = [row for batch in numbers(by_length, 0) for row in batch]
    assert [HARD[row] for row in served] == sorted(HARD, reverse=True)


def test_epoch_longer_than_the_data_can_be_resumed():
    rows = [{**row, "data_source": "ab"[i % 2]} for i, row in enumerate(ROWS)]
    sampler = Mixture({"a": 2.0, "b": 1.0}, rows=12)
    data = module_of(PromptDataModule, *rows, batch_size=2, sampler=sampler)
    whole = numbers(data.train_dataloader(), 1)
    assert len(whole) == len(data.train_dataloader()) == 6
    stopped = data.train_dataloader()
    stopped.batch_sampler.sampler.set_epoch(1)
    batches = iter(stopped)
    first = [each(next(batches), "index") for _ in range(2)]
    resumed = data.train_dataloader()
    resumed.load_state_dict(stopped.state_dict())
    assert first + numbers(resumed, 1) == whole


def test_repeated_prompts_in_an_epoch_have_different_indices_for_their_seeds():
    rows = [{"prompt": letter, "data_source": letter} for letter in "abc"]
    data = module_of(PromptDataModule, *rows, batch_size=6, sampler=Mixture({"a": 4, "b": 1, "c": 1}, rows=6))
    (batch,) = data.train_dataloader()
    assert sorted(each(batch, "text")) == ["a"] * 4 + ["b", "c"]
    assert sorted(each(batch, "index")) == [0, 1, 2, 3, 6, 9]
    assert ["abc"[number % 3] for number in each(batch, "index")] == each(batch, "text")


@dataclass
class FixedOrders:
    """A sampler that returns the given orders, one per epoch."""

    orders: list

    def key(self, fields):
        return None

    def order(self, keys, lengths, seed, epoch):
        return self.orders[epoch]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([0], "FixedOrders returned 1 rows in epoch 1, but 2 in epoch 0"),
        ([0, 2], "FixedOrders returned row 2 in epoch 1, expected 0 to 1"),
        ([-1, 0], "FixedOrders returned row -1 in epoch 1, expected 0 to 1"),
    ],
)
def test_invalid_orders_are_rejected(second, reason):
    order = SamplerOrder(FixedOrders([[1, 0], second]), [None] * 2, [1] * 2, seed=0)
    assert isinstance(FixedOrders([]), Sampler)
    assert list(order) == [1, 0]
    order.set_epoch(1)
    with pytest.raises(ValueError, match=reason):
        iter(order)


def test_order_shorter_than_a_batch_is_rejected():
    data = PromptDataModule(GivenRows(tuple(ROWS)), Letters(), batch_size=4, sampler=FixedOrders([[0, 1]]))
    data.setup("fit")
    with pytest.raises(ValueError, match="batch_size is 4, but the training data have only 2 usable rows"):
        data.train_dataloader()
