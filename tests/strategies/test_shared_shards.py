"""Shards of a frozen base model that two roles share: FSDP keeps none of its own for the second role."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_rlhf.strategies.fsdp import _frozen_shards, _share_shards
from tests.extras.plan.fakes import processes


def storages(role):
    """The storages that FSDP has of the shards of a role."""
    groups = []
    for module in role.modules():
        if hasattr(module, "_get_fsdp_state"):
            groups += module._get_fsdp_state()._fsdp_param_groups
    return {p._sharded_param_data.untyped_storage().data_ptr() for group in groups for p in group.fsdp_params}


@pytest.mark.parametrize("rows", [8, 7])  # 7: the last rank's shard is padded
def test_second_role_has_no_frozen_shards_of_its_own(rows):
    with processes(2):
        mesh = init_device_mesh("cpu", (2,))
        first = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4)).requires_grad_(False)
        second = copy.deepcopy(first)
        for block in first:
            fully_shard(block, mesh=mesh)
        fully_shard(first, mesh=mesh)
        shared = _frozen_shards(first)
        for block in second:
            fully_shard(block, mesh=mesh)
            _share_shards(block, second, shared)
        fully_shard(second, mesh=mesh)
        _share_shards(second, second, shared)
        assert storages(second) == storages(first)
        assert torch.equal(second[0].weight.to_local(), first[0].weight.to_local())
