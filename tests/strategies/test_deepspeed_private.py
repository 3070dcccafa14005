"""Private attributes of DeepSpeed that the strategy uses: they exist, and each check documents its purpose."""

import importlib
import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")

# Module, name, parameters that must be there, what depends on it.
PRIVATE = [
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.scaled_global_norm", [], "the norm, stages 1 and 2"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3._get_norm_groups", [], "the norm, stage 3"),
    ("runtime.bf16_optimizer", "BF16_Optimizer.get_grads_for_norm", [], "the norm, bf16 and stage 1"),
    ("runtime.utils", "get_global_norm_of_tensors", ["input_tensors", "norm_type"], "the norm, bf16 and stage 1"),
    ("runtime.zero.partition_parameters", "Init._convert_to_zero_parameters", ["param_list"], "spreading a model"),
]
LINKED = ["runtime.zero.stage_1_and_2", "runtime.bf16_optimizer"]
CLIPPING = ["runtime.zero.stage_1_and_2", "runtime.zero.stage3", "runtime.bf16_optimizer"]


def result(module, name):
    value = importlib.import_module(f"deepspeed.{module}")
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


@pytest.mark.parametrize(("module", "name", "parameters", "used_for"), PRIVATE)
def test_private_name_exists(module, name, parameters, used_for):
    function = result(module, name)
    assert function is not None, f"deepspeed.{module}.{name} is gone: deepspeed_private.py needs it for {used_for}"
    assert set(parameters) <= set(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize("module", CLIPPING)
def test_step_clips_to_the_attribute(module):
    # That the clipped step is the right one is for tests/distributed/test_deepspeed.py.
    source = inspect.getsource(importlib.import_module(f"deepspeed.{module}"))
    assert "self.clip_grad > 0." in source, f"deepspeed.{module} clips by another attribute: see set_clipping"


@pytest.mark.parametrize("module", LINKED)
def test_state_of_an_empty_first_step_can_be_discarded(module):
    # That the next one registers the state is for tests/distributed/test_rejected_ranks.py.
    source = inspect.getsource(importlib.import_module(f"deepspeed.{module}"))
    name = "self._hp_optimizer_states_linked"
    assert source.count(f"if not {name}:") == source.count(f"{name} = True") == 1, f"see drop_gradients: {module}"
