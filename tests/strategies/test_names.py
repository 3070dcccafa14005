"""A plain strategy name of Lightning selects the corresponding one of this library, and all names are registered."""

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf import PPOModule
from lightning_rlhf.cli.strategy_choice import process_count
from lightning_rlhf.strategies.names import OURS, our_name
from tests.stand_ins import TinyModel, fit, quiet_trainer, responses, rollout_of


@pytest.mark.parametrize(
    ("theirs", "processes", "ours"),
    [
        ("auto", 1, "rlhf_single"),
        ("auto", 2, "rlhf_ddp"),
        ("ddp", 2, "rlhf_ddp"),
        ("DDP", 1, "rlhf_ddp"),
        ("ddp_find_unused_parameters_true", 2, "rlhf_ddp"),
        ("single_device", 1, "rlhf_single"),
        ("fsdp", 4, "rlhf_fsdp"),
        ("fsdp_cpu_offload", 4, "rlhf_fsdp_offload"),
        ("deepspeed", 4, "rlhf_deepspeed_stage_2"),
        ("deepspeed_stage_1", 4, "rlhf_deepspeed_stage_1"),
        ("deepspeed_stage_3_offload", 4, "rlhf_deepspeed_stage_3_offload"),
        ("rlhf_fsdp", 4, "rlhf_fsdp"),
        ("ddp_spawn", 2, "ddp_spawn"),
        ("no_such_thing", 2, "no_such_thing"),
    ],
)
def test_plain_name_selects_the_strategy_of_this_library(theirs, processes, ours):
    assert our_name(theirs, processes) == ours


def test_every_published_name_is_registered():
    inputs = {our_name(name, 2) for name in StrategyRegistry if our_name(name, 2) != name} | set(OURS.values())
    assert inputs <= set(StrategyRegistry)
    assert {name for name in inputs if not name.startswith("rlhf_")} == set()


@pytest.mark.parametrize(
    ("accelerator", "devices", "nodes", "count"),
    [
        ("auto", "auto", 1, 4),
        ("cpu", "auto", 1, 1),
        ("gpu", -1, 2, 8),
        ("auto", 2, 1, 2),
        ("auto", "3", 2, 6),
        ("gpu", [0, 3], 1, 2),
        ("gpu", "0,3,", 1, 2),
        (None, None, 1, 4),
        ("cpu", "many", 1, 1),  # which the Trainer then refuses
    ],
)
def test_number_of_processes_follows_from_the_trainer_arguments(monkeypatch, accelerator, devices, nodes, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert process_count(accelerator, devices, nodes) == count


def test_single_process_strategy_rejects_several_devices():
    with pytest.raises(ValueError, match="one process, but the Trainer has 2 devices: use rlhf_ddp"):
        fit(PPOModule(TinyModel()), [rollout_of(responses(2, seed=0))], strategy="rlhf_single", devices=2)


def test_single_process_strategy_uses_the_device_of_the_trainer():
    assert quiet_trainer(strategy="rlhf_single", devices=1).strategy.root_device == torch.device("cpu")
