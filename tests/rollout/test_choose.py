"""``auto`` takes vLLM where it runs, and says why."""

from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.transformers_engine import TransformersEngine
from lightning_rlhf.rollout.vllm_engine import VLLMEngine
from tests.rollout.engines import source_of


@pytest.fixture
def machine(monkeypatch):
    def machine(vllm, gpu):
        for place in ("choose", "vllm_engine"):
            monkeypatch.setattr(f"lightning_rlhf.rollout.{place}.vllm_installed", lambda: vllm)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return machine


@pytest.mark.parametrize("gpu", [False, True])
def test_without_vllm_transformers_generates(machine, gpu):
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
def test_on_a_cpu_the_size_of_the_heads_decides(machine, changes, kind):
    machine(vllm=True, gpu=False)
    engine, reason = choose_engine(source_of(**changes).hf_config())
    assert type(engine) is kind
    if kind is TransformersEngine:
        size = changes.get("head_dim") or 16
        assert reason.startswith("vLLM's CPU attention takes heads of (32, 64,")
        assert reason.endswith(f"the actor's have {size}")


def test_on_a_gpu_the_size_of_the_heads_does_not_matter(machine):
    machine(vllm=True, gpu=True)
    engine, reason = choose_engine(source_of(head_dim=48).hf_config())
    assert type(engine) is VLLMEngine
    assert reason == "vLLM is installed"


def test_where_it_would_leave_accelerators_idle_transformers_generates(machine, monkeypatch):
    machine(vllm=True, gpu=False)
    npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: npu)
    engine, reason = choose_engine(source_of(head_dim=32).hf_config())
    assert type(engine) is TransformersEngine
    assert reason == "VLLMEngine would leave the npu devices idle"
