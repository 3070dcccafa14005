"""Positions of tokens in a row without padding, with and without prompts that several responses share."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.batching.packing import pack_responses, pack_texts, pack_turns, pad_parts
from tests.helpers import properties


def test_texts_worked_by_hand():
    ids = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [1, 2, 0, 0]])
    packing = pack_texts([3, 1, 2], 4)
    assert ids.flatten()[packing.tokens].tolist() == [5, 6, 7, 8, 1, 2]
    assert packing.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packing.lengths == ((3, 1, 2), ((), (), ()))
    index = torch.tensor([[0, 2, 3], [0, 1, 9], [1, 0, 0]])
    assert packing.row_index(index).tolist() == [[0, 2, 2], [3, 3, 3], [5, 4, 4]]


def test_shared_prompt_worked_by_hand():
    # Rows 0 and 2 have the prompt [5, 6], row 1 has the prompt [8]; the row is 5 6 | 8 9 | 7 | 3 4.
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [5, 6, 3, 4]])
    packing = pack_responses([2, 1, 2], [1, 1, 2], [4, 0, 4], 4)
    assert ids.flatten()[packing.tokens].tolist() == [5, 6, 8, 9, 7, 3, 4]
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2, 2, 3]]
    assert packing.lengths == ((2, 2), ((1, 2), ()))
    assert packing.lengths.tokens == 7
    positions = packing.row_index(torch.tensor([[0, 1, 2], [0, 1, 2], [1, 2, 3]]))
    assert positions.tolist() == [[0, 1, 4], [2, 3, 3], [1, 5, 6]]


def test_rows_of_several_texts_worked_by_hand():
    """The texts of row 0 are 5 6 | 7, those of row 1 are 8 | 9 1; rows 2 and 3 share their prompt, 2."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 1], [2, 3, 0], [2, 4, 0]])
    packing = pack_responses([1, 1, 1, 1], [2, 2, 1, 1], [4, 5, 2, 2], 3, breaks=[[2], [1], [], []])
    assert ids.flatten()[packing.tokens].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert packing.positions.tolist() == [[0, 1, 0, 0, 0, 1, 0, 1, 1]]
    assert packing.lengths == ((2, 1, 1, 2, 1), ((), (), (), (), (1, 1)))
    positions = packing.row_index(torch.tensor([[0, 1, 2]] * 4))
    assert positions.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 7], [6, 8, 8]]


def test_common_beginnings_of_the_texts_of_a_row_worked_by_hand():
    """The texts of row 0 are 5 6 7 | 5 6 8 9 with 5 6 in common, those of row 1 are 1 | 2 3; row 2 is one text."""
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 9], [1, 2, 3, 0, 0, 0, 0], [4, 4, 0, 0, 0, 0, 0]])
    packing = pack_turns([7, 3, 2], [[3], [1], []], [2, 0, 0], 7)
    assert ids.flatten()[packing.tokens].tolist() == [5, 6, 1, 2, 3, 4, 4, 7, 8, 9]
    assert packing.positions.tolist() == [[0, 1, 0, 0, 1, 0, 1, 2, 2, 3]]
    assert packing.lengths == ((2, 1, 2, 2), ((1, 2), (), (), ()))
    positions = packing.row_index(torch.arange(7).expand(3, -1))
    assert positions.tolist() == [[0, 1, 7, 0, 1, 8, 9], [2, 3, 4, 4, 4, 4, 4], [5, 6, 6, 6, 6, 6, 6]]


def test_padded_texts_of_rows_worked_by_hand():
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 0, 0]])
    packing = pad_parts([4, 2], [[3], []], 4)
    rows = ids.flatten()[packing.tokens].view(-1, packing.width)
    assert [row[:length].tolist() for row, length in zip(rows, (3, 1, 2), strict=True)] == [[5, 6, 7], [8], [9, 1]]
    assert packing.row_index(torch.tensor([[0, 2, 3], [0, 1, 3]])).tolist() == [[0, 2, 3], [6, 7, 7]]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=9)


@properties
@given(ROWS, st.integers(0, 3))
def test_every_token_is_found_at_its_position(rows, extra):
    """The prompt of group g has g + 1 tokens; its ids differ from those of all other rows, except in its prompt."""
    groups = [group for group, _ in rows]
    prompts = [group + 1 for group in groups]
    responses = [length for _, length in rows]
    width = max(p + r for p, r in zip(prompts, responses, strict=True)) + extra
    ids = torch.arange(len(rows) * width).view(len(rows), -1) + 1000
    for row, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        ids[row, :prompt] = torch.arange(prompt) + 10 * group
    packing = pack_responses(prompts, responses, groups, width)
    packed = ids.flatten()[packing.tokens]
    assert packed.shape == packing.positions.shape[1:] == (packing.lengths.tokens,)
    positions = packing.row_index(torch.arange(width).expand(len(rows), -1))
    for row, total in enumerate(p + r for p, r in zip(prompts, responses, strict=True)):
        assert torch.equal(packed[positions[row, :total]], ids[row, :total])
        assert packing.positions[0, positions[row, :total]].tolist() == list(range(total))
        assert bool((positions[row, total:] == positions[row, total - 1]).all())
    once = sum(group + 1 for group in set(groups))
    assert packing.lengths.tokens == once + sum(responses)
