import torch

from lightning_rlhf.functional.data_ranks import ONE_RANK


def test_one_rank_has_all_rows():
    assert (ONE_RANK.rank, ONE_RANK.size) == (0, 1)
    values = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    for method in (ONE_RANK.sum, ONE_RANK.max, ONE_RANK.gather):
        assert torch.equal(method(values), values)
