"""A weight that vLLM loses after a correct push is reported with its name in transformers."""

import logging

import pytest
import torch

from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.callbacks.conftest import Run
from tests.rollout.engines import largest_gap, parameters_of, prompts_of, pushed, source_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = [name for name, _ in source_of(model_type="qwen2").causal().lm.named_parameters()]
QKV = "model.layers.1.self_attn.qkv_proj"


@pytest.fixture
def lose(engines, fault):
    """Push weights with a fault; returns the actor and the largest difference of log-probabilities."""

    def lose(what):
        fault.write_text("nothing")
        pushed(engines.lossy, source_of(seed=1, model_type="qwen2"))
        fault.write_text(what)
        actor = source_of(seed=2, model_type="qwen2").causal().eval()
        for parameter in actor.lm.parameters():
            if parameter.ndim == 1:  # new norms are all ones, new biases zeros
                torch.nn.init.normal_(parameter)
        engines.lossy.update_weights(parameters_of(actor), 1)
        completions = generate(engines.lossy, prompts_of(4), SamplingParams(16), range(4))
        return actor, largest_gap(actor, prompts_of(4), completions)

    yield lose
    fault.write_text("nothing")


def first_difference(engines, actor):
    return engines.lossy.first_difference(parameters_of(actor))


def test_complete_push_reports_no_parameter(engines, lose):
    actor, gap = lose("nothing")
    assert gap < 1e-5
    assert first_difference(engines, actor) is None


@pytest.mark.parametrize("how", ["skip", "half"])
@pytest.mark.parametrize("name", NAMES)
def test_completely_or_partly_lost_parameter_is_reported(engines, lose, name, how):
    actor, gap = lose(f"{how} {name}")
    assert not gap <= 0.01  # uninitialized memory may contain NaN
    assert first_difference(engines, actor) == name


def test_parameter_that_vllm_counts_without_loading_is_reported(engines, lose):
    actor, _ = lose("last model.layers.0.mlp.gate_up_proj")
    assert first_difference(engines, actor) == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (f"packed {QKV}", "model.layers.1.self_attn.q_proj.weight"),
        ("packed model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.weight"),
        ("tied", "model.embed_tokens.weight"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="weights are packed on CPUs")
def test_outdated_packed_copy_is_reported(engines, lose, what, name):
    actor, gap = lose(what)
    assert not gap <= 0.01  # uninitialized memory may contain NaN
    assert first_difference(engines, actor) == name


def test_pushed_weights_are_compared_first(engines, lose):
    actor, _ = lose(f"skip {NAMES[0]}")
    with torch.no_grad():
        dict(actor.lm.named_parameters())[NAMES[5]].add_(1)
    assert first_difference(engines, actor) == NAMES[5]


def test_comparison_does_not_change_the_engine(engines, lose):
    actor, _ = lose("nothing")
    first_difference(engines, actor)
    completions = generate(engines.lossy, prompts_of(4), SamplingParams(16), range(4))
    assert largest_gap(actor, prompts_of(4), completions) < 1e-5
    assert {completion.policy_version for completion in completions} == {1}


def test_failed_trace_is_logged_and_reports_no_parameter(engines, lose, fault, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    actor, _ = lose("nothing")
    fault.write_text("fail")
    assert first_difference(engines, actor) is None
    assert "could not be traced: RunError: FloatingPointError: no luck today" in caplog.text


def test_engine_check_of_a_run_reports_the_lost_weight(engines, fault, tmp_path, monkeypatch):
    name = "model.layers.1.self_attn.v_proj.weight"
    monkeypatch.setenv("FORGETFUL", str(fault))
    fault.write_text(f"skip {name}")
    engine = VLLMEngine(arguments={"worker_extension_cls": "tests.rollout.forgetful.Forgetful"})
    try:
        with pytest.raises(RuntimeError, match="the engine does not hold the actor's weights: after") as error:
            Run(tmp_path, loop={"engine": engine, "check_rows": 2, "validate_at_ends": False}).fit()
    finally:
        fault.write_text("nothing")
    assert str(error.value).endswith(f"the first parameter that differs is {name}")
