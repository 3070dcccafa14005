"""The engine ``auto`` is vLLM where it can run, with a reason."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.models.loading import FromConfig, save_architecture
from lightning_rlhf.rollout.choose import choose_engine, weight_bytes
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams
from tests.rollout.engines import largest_gap, pushed, source_of
from tests.rollout.in_process import InProcessVLLMEngine

SMALL = {
    "vocab_size": 18, "hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    def machine(vllm, gpu):
        for position in ("choose", "vllm.engine"):
            monkeypatch.setattr(f"lightning_rlhf.rollout.{position}.vllm_installed", lambda: vllm)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return machine


@pytest.mark.parametrize("gpu", [False, True])
def test_transformers_is_selected_without_vllm(machine, gpu):
    machine(vllm=False, gpu=gpu)
    engine, reason = choose_engine(source_of().hf_config())
    assert type(engine) is TransformersEngine
    assert reason == "vLLM is not installed"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"head_dim": 32}, VLLMEngine),
        ({"head_dim": 48}, TransformersEngine),
        ({"head_dim": None, "hidden_size": 128}, VLLMEngine),  # 64 each
        ({"head_dim": None, "hidden_size": 32}, TransformersEngine),  # 16 each
        ({"model_type": "gpt2", "head_dim": None, "hidden_size": 32}, TransformersEngine),
    ],
)
def test_head_size_decides_on_a_cpu(machine, changes, kind):
    machine(vllm=True, gpu=False)
    engine, reason = choose_engine(source_of(**changes).hf_config())
    assert type(engine) is kind
    if kind is TransformersEngine:
        size = changes.get("head_dim") or 16
        assert reason.startswith("vLLM's CPU attention supports head sizes (32, 64,")
        assert reason.endswith(f"but the actor's is {size}")


QWEN = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.mark.parametrize("installed", [False, True])
def test_vllm_class_that_needs_torchvision_requires_it(machine, monkeypatch, installed):
    machine(vllm=True, gpu=False)
    result = importlib.util.find_spec
    instance = lambda name: (installed or None) if name == "torchvision" else result(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", instance)
    config = FromConfig({**SMALL, "model_type": "qwen3_5_text", **QWEN}).hf_config()
    engine, reason = choose_engine(config)
    assert type(engine) is (VLLMEngine if installed else TransformersEngine)
    message = "vLLM's class for qwen3_5_text imports torchvision, which is not installed"
    assert reason == ("vLLM is installed" if installed else message)


def test_gpt_oss_is_generated_with_transformers_because_vllm_loses_pushed_sinks(machine, tmp_path):
    machine(vllm=True, gpu=False)
    source = FromConfig({**SMALL, "model_type": "gpt_oss"})
    engine, reason = choose_engine(source.hf_config())
    assert type(engine) is TransformersEngine
    assert reason == "vLLM 0.32 does not load pushed attention sinks and experts of gpt_oss"
    save_architecture(source, tmp_path)
    with pytest.raises(ValueError, match="experts of gpt_oss, so it would generate with old ones: use TransformersE"):
        VLLMEngine().start(EngineSetup(tmp_path, "float32", 16, tmp_path / "engine.log"))
    assert not (tmp_path / "engine.log").exists()


LONG_ROPE = {
    **SMALL, "model_type": "phi3", "max_position_embeddings": 128, "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 16, "long_factor": [9.0] * 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("max_tokens", [0, 32, 33])
def test_long_rope_beyond_its_original_length_is_generated_with_transformers(machine, max_tokens, tmp_path):
    machine(vllm=True, gpu=False)
    source = FromConfig(LONG_ROPE)
    engine, reason = choose_engine(source.hf_config(), max_tokens=max_tokens)
    assert type(engine) is (VLLMEngine if max_tokens <= 32 else TransformersEngine)
    if max_tokens <= 32:
        assert reason == "vLLM is installed"
        return
    assert reason.startswith("vLLM would compute all texts of phi3 with the Long-RoPE factors of texts above 32 tok")
    assert reason.endswith("shorten both to 32 tokens together (max_tokens of the data, max_response_tokens)")
    save_architecture(source, tmp_path)
    for kind in (VLLMEngine, InProcessVLLMEngine):
        with pytest.raises(
            ValueError, match=r"because prompt and response have up to 33; .* or use TransformersEngine$"
        ):
            kind().start(EngineSetup(tmp_path, "float32", max_tokens, tmp_path / "engine.log"))
    assert not (tmp_path / "engine.log").exists()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_long_rope_up_to_its_original_length_has_the_actor_log_probabilities(tmp_path):
    source = FromConfig({**LONG_ROPE, "eos_token_id": 2, "initializer_range": 0.15}, seed=0)
    save_architecture(source, tmp_path)
    engine = VLLMEngine()
    engine.start(EngineSetup(tmp_path, "float32", 32, tmp_path / "engine.log"))
    try:
        actor = pushed(engine, source)
        prompts = [[4, 5, 6, 7] * 4, [3] * 9]
        completions = generate(engine, prompts, SamplingParams(16), range(2))
        assert largest_gap(actor, prompts, completions) < 1e-5
    finally:
        engine.close()


def test_head_size_does_not_matter_on_a_gpu(machine):
    machine(vllm=True, gpu=True)
    engine, reason = choose_engine(source_of(head_dim=48).hf_config())
    assert type(engine) is VLLMEngine
    assert reason == "vLLM is installed"


def test_transformers_is_selected_if_vllm_would_leave_accelerators_idle(machine, monkeypatch):
    machine(vllm=True, gpu=False)
    npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: npu)
    engine, reason = choose_engine(source_of(head_dim=32).hf_config())
    assert type(engine) is TransformersEngine
    assert reason == "VLLMEngine does not support npu devices"


# -- how many GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(machine, monkeypatch):
    """Simulate eight GPUs whose engines get 0.4 of the given multiple of the small model's bytes."""

    def gpus(multiple):
        machine(vllm=True, gpu=True)
        total = multiple * weight_bytes(source_of().hf_config(), "bfloat16") / 0.4
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))

    return gpus


def sizes(engine):
    if isinstance(engine, SharedEngine):
        return engine.traits.ranks, engine._engine._tensor_parallel_size
    return 1, engine._tensor_parallel_size


def test_bytes_of_a_model_are_counted_without_building_it():
    config = source_of().hf_config()
    instance = sum(parameter.numel() for parameter in source_of().causal().parameters())
    assert weight_bytes(config, "float32") == 4 * instance
    assert weight_bytes(config, "bfloat16") == 2 * instance


@pytest.mark.parametrize(
    ("multiple", "ranks", "dtype", "size"),
    [
        (2.1, 1, "bfloat16", 1),
        (1.9, 1, "bfloat16", 2),
        (2.1, 1, "float32", 2),
        (0.9, 1, "bfloat16", 4),
        (0.3, 1, "bfloat16", 8),
        (2.1, 2, "bfloat16", 2),
        (0.9, 2, "bfloat16", 4),
    ],
)
def test_weights_must_take_less_than_half_of_the_engine_memory(gpus, multiple, ranks, dtype, size):
    gpus(multiple)
    engine, _ = choose_engine(source_of().hf_config(), ranks, dtype, world_size=8)
    assert sizes(engine) == (size, size)


def test_model_too_large_for_the_engines_of_a_machine_is_rejected(gpus):
    gpus(0.2)
    with pytest.raises(ValueError, match=r"the actor's weights take 0.0 GiB, .* on 8 GPUs .* VLLMServerEngine"):
        choose_engine(source_of().hf_config(), 1, "bfloat16", world_size=8)
    gpus(1.5)
    with pytest.raises(ValueError, match=r"on 1 GPUs .*the run 3 processes"):
        choose_engine(source_of().hf_config(), 1, "bfloat16", world_size=3)


def test_one_process_has_one_gpu(gpus):
    gpus(0.2)
    assert sizes(choose_engine(source_of().hf_config(), 1, "bfloat16", world_size=1)[0]) == (1, 1)
