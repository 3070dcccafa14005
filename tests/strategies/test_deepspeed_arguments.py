"""Arguments of the DeepSpeed strategies: invalid ones raise, and valid ones give the expected configuration."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_rlhf.models.tensors import layers
from lightning_rlhf.strategies import registry  # noqa: F401
from lightning_rlhf.strategies.deepspeed.config import configuration, of_role, with_bucket
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from tests.stand_ins import TinyModel

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "rlhf_deepspeed_stage_1": (1, False, False),
    "rlhf_deepspeed_stage_2": (2, False, False),
    "rlhf_deepspeed_stage_2_offload": (2, True, False),
    "rlhf_deepspeed_stage_3": (3, False, False),
    "rlhf_deepspeed_stage_3_offload": (3, True, True),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_selects_a_stage_and_offloading(name):
    registered = StrategyRegistry[name]
    stage, optimizer, params = NAMES[name]
    inputs = {"stage": 2, "offload_optimizer": False, "offload_params": False} | registered["init_params"]
    assert registered["strategy"] is RLHFDeepSpeedStrategy
    assert inputs == {"stage": stage, "offload_optimizer": optimizer, "offload_params": params}


@pytest.mark.slow
def test_registered_names_do_not_import_deepspeed():
    code = "import lightning_rlhf.strategies.registry, sys; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_missing_deepspeed_raises_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs DeepSpeed, .*: pip install 'lightning-rlhf\[deepspeed\]'$"):
        RLHFDeepSpeedStrategy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "stage must be 1, 2 or 3, got 0; use rlhf_ddp"),
        ({"stage": 2, "offload_params": True}, "offloads weights in stage 3 only, got stage 2"),
        ({"stage": 2, "offload_frozen": True}, "offloads weights in stage 3 only, got stage 2"),
        (
            {"over": {"gradient_clipping": 1.0}},
            "'gradient_clipping': set the module's max_grad_norm",
        ),
        ({"over": {"bf16": {"enabled": True}}}, "'bf16': set the Trainer's precision"),
        ({"over": {"optimizer": {}}}, "'optimizer': set the module's optimizer"),
        ({"over": {"zero_optimization": {"stage": 1}}}, "zero_optimization.stage: set the argument stage"),
    ],
)
def test_contradicting_options_are_rejected(options, message):
    inputs = {"stage": 3, "offload_optimizer": False, "offload_params": False, "offload_frozen": False, "over": {}}
    with pytest.raises(ValueError, match=message):
        configuration(**(inputs | options))


def test_user_configuration_overrides_the_default_key_by_key():
    over = {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}, "reduce_bucket_size": 7}, "steps_per_print": 3}
    made = configuration(3, True, False, False, over)
    assert made["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available(), "ratio": 0.5},
        "reduce_bucket_size": 7,
    }
    assert made["steps_per_print"] == 3
    assert made["gradient_accumulation_steps"] == 1
    assert over["zero_optimization"]["reduce_bucket_size"] == 7
    assert with_bucket(made, [nn.Parameter(torch.zeros(5))])["zero_optimization"]["reduce_bucket_size"] == 7


def test_frozen_role_has_no_optimizer_and_a_separate_offload_option():
    shared = configuration(3, True, True, True, {})
    assert of_role(shared, frozen=False, offload_frozen=False, bfloat16=False) == shared
    saved = of_role(shared, frozen=True, offload_frozen=False, bfloat16=False)["zero_optimization"]
    assert saved == {"stage": 3}
    moved = of_role(configuration(3, False, False, True, {}), frozen=True, offload_frozen=True, bfloat16=False)
    assert moved["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_bfloat16_gradients_are_accumulated_in_float32_by_default():
    plain = of_role(configuration(2, False, False, False, {}), frozen=False, offload_frozen=False, bfloat16=True)
    assert (plain["bf16"], plain["data_types"]) == ({"enabled": True}, {"grad_accum_dtype": "fp32"})
    over = {"data_types": {"grad_accum_dtype": "bf16"}}
    other = of_role(configuration(2, False, False, False, over), frozen=False, offload_frozen=False, bfloat16=True)
    assert other["data_types"] == {"grad_accum_dtype": "bf16"}


def test_gradient_buffer_is_limited_to_the_gradients_and_the_default_of_deepspeed():
    made = with_bucket(configuration(2, False, False, False, {}), [nn.Parameter(torch.zeros(5, 3))])
    assert made["zero_optimization"]["reduce_bucket_size"] == 15
    huge = nn.Parameter(torch.zeros(800_000_000, device="meta"))
    made = with_bucket(configuration(2, False, False, False, {}), [huge])
    assert made["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_layers_are_the_blocks_and_all_parameters_outside_of_blocks():
    model = TinyModel().causal().lm
    result = list(layers(model))
    assert [item for layer in result for item in layer] == list(model.named_parameters())
    assert [len(layer) for layer in result] == [1, 9, 9, 1, 1]
    assert {name for name, _ in result[1]} == {
        n for n, _ in model.named_parameters() if n.startswith("model.layers.0.")
    }
    norms = list(layers(model, lambda name: "norm" in name))
    assert [len(layer) for layer in norms] == [2, 2, 1]
