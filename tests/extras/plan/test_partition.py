"""Shards of a model compared with tensors that the libraries store, for more ranks than processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.extras.plan import partition
from lightning_rlhf.extras.plan.architecture import Parameter, architecture
from tests.extras.plan.fakes import ARCHITECTURES, processes, sharded, source

DENSE = ("qwen2", "llama", "qwen3")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("kind", "count", "split"),
    [(kind, count, 1) for kind in ARCHITECTURES for count in (8, 64)]
    + [(kind, count, split) for kind in DENSE for count, split in ((8, 2), (64, 4))],
)
def test_fsdp_stores_the_planned_elements(kind, count, split):
    fields = {"num_key_value_heads": 4}  # so that four ranks can split them
    model = architecture(source(kind, **fields).hf_config(), tensor_parallel_size=split)
    with processes(count), torch.device("meta"):
        role = sharded(source(kind, **fields).causal(), count, split)
        stored = sum(parameter.to_local().numel() for parameter in role.parameters())
    assert stored == partition.fsdp_elements(model.parameters, count // split, split)


def test_fused_experts_are_sharded_along_another_dimension_for_more_ranks():
    experts = Parameter((8, 384, 64), layer=0, split=None)
    assert partition.fsdp_elements([experts], 8) == 384 * 64
    assert partition.fsdp_elements([experts], 64) == 8 * 6 * 64
    assert partition.fsdp_elements([experts], 80) == 384 * 64  # 80 divides nothing


def test_rules_by_hand():
    parameters = [Parameter((10, 3), 0, 0), Parameter((7,), 0, None)]
    assert partition.split_elements(parameters, 2) == 5 * 3 + 7
    assert partition.fsdp_elements(parameters, 4) == 3 * 3 + 2
    assert partition.fsdp_elements(parameters, 4, split=2) == 2 * 3 + 2
    assert partition.zero3_elements(parameters, 4) == 8 + 2
    assert partition.zero3_elements(parameters, 4, persistent=10) == 8 + 2 + 7
    assert partition.flat_elements(37, 4) == 10


ZERO = """
import os, sys
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
import torch
from tests.extras.plan.fakes import processes, source
with processes(8):
    import deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it waits for the other processes
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    role = source("qwen2").causal()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=role, config_dict_or_path=config)
    print("stage 3:", sum(parameter.ds_tensor.numel() for parameter in role.parameters()))
    for stage in (1, 2):
        role = source("qwen2").causal()
        config["zero_optimization"]["stage"] = stage
        engine, optimizer, *_ = deepspeed.initialize(
            model=role, optimizer=torch.optim.AdamW(role.parameters()), model_parameters=list(role.parameters()),
            config=config, dist_init_required=False)
        print(f"stage {stage}:", sum(part.numel() for part in optimizer.single_partition_of_fp32_groups))
"""


@pytest.mark.slow
def test_deepspeed_stores_the_planned_elements():
    pytest.importorskip("deepspeed", reason="needs DeepSpeed", exc_type=ModuleNotFoundError)
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ZERO], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("stage "))
    model = architecture(source("qwen2").hf_config())
    assert int(printed["stage 3"]) == partition.zero3_elements(model.parameters, 8)
    assert int(printed["stage 1"]) == int(printed["stage 2"]) == partition.flat_elements(model.elements, 8)
