"""Roles on one quantized base have the updates of separate copies with the dequantized weights."""

from functools import partial

import pytest
import torch

from lightning_rlhf import DistillationModule, FromConfig, GRPOModule, PPOModule, Pretrained
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.models.lora import LoRA, is_adapter
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.helpers import assert_close
from tests.models.architectures import tiny
from tests.modules.test_long_texts import ARCHITECTURE, PROMPT, RESPONSES, tokens
from tests.stand_ins import Response, fit, responses, rollout_of

LORA = LoRA(4, 8)
SGD = partial(torch.optim.SGD, lr=0.1)
BATCHES = [rollout_of(responses(6, seed=seed)) for seed in range(3)]


def with_dequantized(architecture, quantization, directory):
    """Return a quantized source, and sources in float32 of copies of the weights that it stands for."""
    FromConfig(architecture, seed=0).causal().save_pretrained(directory / "base")
    quantized = Pretrained(str(directory / "base"), quantization=quantization, lora=LORA)
    for name in ("actor", "critic", "ref"):
        quantized.causal().save_pretrained(directory / name)  # adapters begin at zero
    return quantized, [Pretrained(str(directory / name), lora=LORA) for name in ("actor", "critic", "ref")]


def trained(module):
    """Return the trained parameters after an update of each batch."""
    fit(module, BATCHES)
    return {name: each.detach() for name, each in module.named_parameters() if each.requires_grad}


def assert_equal_weights(ours, theirs, atol):
    assert ours.keys() == theirs.keys()
    assert all(is_adapter(name) or name.endswith("score.weight") for name in ours)
    for name, value in theirs.items():
        assert_close(ours[name], value, atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "granite", "phi3", "mamba"])
def test_ppo_of_architectures(kind, quantization, tmp_path):
    quantized, (actor, critic, ref) = with_dequantized(tiny(kind), quantization, tmp_path)
    options = {"optimizer": SGD, "critic_optimizer": SGD, "kl_loss": KLTerm(0.3, "k3"), "minibatch_size": 3}
    one = PPOModule(quantized, critic=quantized, **options)
    apart = PPOModule(actor, critic=critic, ref=ref.base, **options)
    ours = trained(one)
    assert not hasattr(one, "ref")
    assert all(value.any() for name, value in ours.items() if "lora_B" in name)
    assert_equal_weights(ours, trained(apart), atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("top_k", [None, 3])
def test_student_and_teacher(top_k, tmp_path):
    quantized, (student, teacher, _) = with_dequantized(tiny("qwen3"), "nf4", tmp_path)
    divergence = Divergence(0.5, top_k)
    taught = {}
    for name, student_source, teacher_source in (("one", quantized, quantized), ("apart", student, teacher.base)):
        module = DistillationModule(student_source, teacher_source, divergence, optimizer=SGD)
        module.build_role = with_moved_adapters(module.build_role, "actor")
        taught[name] = trained(module)
    assert_equal_weights(taught["one"], taught["apart"], atol=1e-5)
    assert any(value.any() for name, value in taught["one"].items() if "lora_B" in name)


def with_moved_adapters(build, role):
    """Return a function that builds roles, of which one has other adapters, so that it differs from the others."""

    def built(name):
        model = build(name)
        if name == role:
            generator = torch.Generator().manual_seed(5)
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        return model

    return built


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_grpo_update_on_6000_tokens(quantization, tmp_path):
    quantized, (actor, _, ref) = with_dequantized(ARCHITECTURE, quantization, tmp_path)
    prompt = tokens(PROMPT, 0).tolist()
    rows = [Response(prompt, tokens(size, 5 + i).tolist(), reward=i % 3) for i, size in enumerate(RESPONSES)]
    rollout = rollout_of(rows)
    rollout.group[:] = 0
    options = {"minibatch_size": 4, "kl_loss": KLTerm(), "micro_batch_tokens": 7000, "optimizer": SGD}
    results = []
    for module in (GRPOModule(quantized, **options), GRPOModule(actor, ref=ref.base, **options)):
        fit(module, [rollout])
        assert module.layout.packed
        results.append({name: each.detach() for name, each in module.named_parameters() if each.requires_grad})
    assert any(value.any() for name, value in results[0].items() if "lora_B" in name)
    assert_equal_weights(*results, atol=1e-6)
