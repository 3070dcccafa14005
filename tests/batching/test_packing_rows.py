import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.batching.sequences import pack
from tests.helpers import properties


def test_a_case_worked_by_hand():
    ids = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [1, 2, 0, 0]])
    packed, positions, starts = pack(ids, torch.tensor([3, 1, 2]))
    assert packed.tolist() == [[5, 6, 7, 8, 1, 2]]
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert starts.tolist() == [0, 3, 4]


@properties
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 3))
def test_every_token_is_found_again_at_its_row_and_position(lengths, extra):
    ids = torch.arange(len(lengths) * (max(lengths) + extra)).view(len(lengths), -1)
    packed, positions, starts = pack(ids, torch.tensor(lengths))
    assert packed.shape == positions.shape == (1, sum(lengths))
    for row, length in enumerate(lengths):
        for place in range(length):
            assert packed[0, starts[row] + place] == ids[row, place]
            assert positions[0, starts[row] + place] == place
