"""Discounted sums; the comparison with verl is in tests/objectives/test_return_advantages.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.functional.masked import discounted_sums, next_values
from tests.helpers import assert_close, float64, masks, normal, pad_columns, properties, seeds, with_garbage


def test_case_worked_by_hand():
    # First row, gamma 1/2, backwards: 4; 2 + 4/2 = 4; 1 + 4/2 = 3. In the second the middle token does not count.
    rewards = float64([[1, 2, 4], [1, 9, 4]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    assert_close(discounted_sums(rewards, mask, 0.5), [[3, 4, 4], [3, 0, 4]], rtol=0, atol=0)
    assert_close(discounted_sums(rewards, mask), [[7, 6, 4], [5, 0, 4]], rtol=0, atol=0)


@properties
@given(masks(), st.sampled_from([0.0, 0.3, 0.97, 1.0]), seeds)
def test_sums_are_those_of_the_definition(mask, gamma, seed):
    rewards = with_garbage(normal(*mask.shape, seed=seed), mask)
    sums = discounted_sums(rewards, mask, gamma)
    for row in range(len(mask)):
        r = rewards[row][mask[row]].tolist()
        expected = [sum(gamma**k * r[t + k] for k in range(len(r) - t)) for t in range(len(r))]
        assert_close(sums[row][mask[row]], float64(expected), rtol=1e-12, atol=1e-14)
    assert (sums[~mask] == 0).all()


@properties
@given(masks(), st.integers(1, 3), seeds)
def test_padding_changes_nothing(mask, columns, seed):
    rewards, wider = normal(*mask.shape, seed=seed), pad_columns(mask, columns)
    sums = discounted_sums(with_garbage(pad_columns(rewards, columns), wider), wider, 0.9)
    assert torch.equal(sums, pad_columns(discounted_sums(rewards, mask, 0.9), columns))


def test_each_response_may_have_a_discount():
    rewards, mask = float64([[1, 2, 4], [1, 2, 4]]), torch.ones(2, 3, dtype=torch.bool)
    sums = discounted_sums(rewards, mask, float64([0.5, 0.25]))
    assert_close(sums, [[3, 4, 4], [1.75, 3, 4]], rtol=0, atol=0)


def test_next_values_skip_positions_outside_the_mask():
    mask = torch.tensor([[True, False, True, False], [False, True, False, False], [False] * 4])
    values = float64([[1, 9, 2, 9], [9, 3, 9, 9], [9] * 4])
    expected = [[2, 2, 7, 7], [3, 8, 8, 8], [6, 6, 6, 6]]
    assert_close(next_values(values, mask, float64([7, 8, 6])), expected, rtol=0, atol=0)
    assert next_values(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), torch.zeros(2)).shape == (2, 0)


def test_a_long_response_needs_few_kernels():
    with Kernels() as kernels:
        discounted_sums(torch.ones(2, 20_000), torch.ones(2, 20_000, dtype=torch.bool), 0.99)
    assert kernels.count < 250  # with the views of their arguments


class Kernels(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


def test_empty_input_gives_empty_output():
    assert discounted_sums(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)
    assert discounted_sums(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


def test_half_precision_is_summed_in_float64():
    # 4096 + 1 is 4096 in half precision.
    sums = discounted_sums(torch.tensor([[1.0, 4096.0]]).half(), torch.ones(1, 2, dtype=torch.bool))
    assert sums.dtype == torch.float64
    assert_close(sums, [[4097, 4096]], rtol=0, atol=0)
