"""The sizes of the mesh of ``rlhf_fsdp``, which are validated before any process group exists."""

import pytest
import torch

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy


def start(nodes, per_node, **options):
    strategy = RLHFFSDPStrategy(**options)
    strategy.num_nodes, strategy.parallel_devices = nodes, [torch.device("cpu")] * per_node
    strategy.setup_environment()


@pytest.mark.parametrize("option", ["tensor_parallel_size", "sequence_parallel_size", "shard_size"])
def test_size_is_at_least_1(option):
    with pytest.raises(UsageError, match=f"{option} must be at least 1.*, got 0"):
        RLHFFSDPStrategy(**{option: 0})


def test_error_names_the_option_that_was_set():
    with pytest.raises(UsageError, match="tensor_parallel_size: 3 does not divide the 8 processes of this run"):
        start(1, 8, tensor_parallel_size=3)
    with pytest.raises(UsageError, match=r"^shard_size: 3 does not divide the 8 data ranks"):
        start(1, 8, shard_size=3)


def test_shards_of_a_node_that_do_not_fit_are_not_the_mistake_of_an_option_that_is_not_set():
    with pytest.raises(UsageError, match=r"^the number of data ranks of a node, 2, does not divide the 5 .* set shard"):
        start(2, 5, tensor_parallel_size=2)
