"""ProcessRanks: exchange between processes that have different numbers of rows."""

import pytest
import torch

from lightning_rlhf.strategies.distributed import ProcessRanks
from tests.helpers import assert_close


def exchange(rank, rendezvous):
    """Run one of three processes, which have two rows, none and one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    ranks = ProcessRanks(rank, 3, torch.device("cpu"))
    mine = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [5.0, 6.0]], dtype=torch.float64)
    rows = mine[[[0, 1], [], [2]][rank]]
    assert_close(ranks.gather(rows), mine, equal_nan=True)
    assert ranks.gather(rows > 2).tolist() == [[False, False], [True, False], [True, True]]
    assert_close(ranks.sum(torch.tensor([1.0, rank])), [3, 3])
    assert_close(ranks.max(torch.tensor([-1.0, rank])), [-1, 2])
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_three_processes_exchange_sums_maxima_and_rows(tmp_path):
    torch.multiprocessing.spawn(exchange, (tmp_path / "rendezvous",), nprocs=3)
