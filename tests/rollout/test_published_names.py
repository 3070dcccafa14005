"""Tensors under the names of published files, which transformers itself writes."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_rlhf.models.loading import FromConfig, save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.vllm.sync import PublishedNames
from tests.cli.published_architectures import PUBLISHED, SMALL
from tests.vision_models import architecture

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "vocab_size": 50,
}  # fmt: skip
TEXTS = [published for published, _ in PUBLISHED.values() if "vision_config" not in published]
ARCHITECTURES = (
    {kind: architecture(kind) for kind in ("idefics3", "qwen2_5_vl", "qwen3_vl")}
    | {
        kind: {**published, **SMALL[kind], "vocab_size": 50}
        for published in TEXTS
        for kind in [published["model_type"]]
    }
    | {"mixtral": MIXTRAL, "phi3": MIXTRAL | {"model_type": "phi3", "pad_token_id": 0}}
)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_names_and_values_equal_those_of_the_file_that_transformers_writes(kind, tmp_path):
    source = FromConfig(ARCHITECTURES[kind], seed=0)
    model = source.causal()
    for _, tensor in whole_tensors(model.lm):
        tensor.copy_(torch.randn_like(tensor))  # new norms are all ones, new biases zeros
    save_architecture(source, tmp_path)
    result = {name: tensor.clone() for name, tensor in PublishedNames(tmp_path)(whole_tensors(model.lm))}
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert result.keys() == saved.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in saved.items())


def test_experts_are_yielded_one_by_one(tmp_path):
    save_architecture(FromConfig(ARCHITECTURES["qwen3_moe"]), tmp_path)
    stacked = torch.arange(4 * 64 * 64.0).view(4, 64, 64)
    result = dict(PublishedNames(tmp_path)([("model.layers.1.mlp.experts.gate_up_proj", stacked)]))
    assert len(result) == 8
    assert torch.equal(result["model.layers.1.mlp.experts.2.gate_proj.weight"], stacked[2, :32])
    assert torch.equal(result["model.layers.1.mlp.experts.3.up_proj.weight"], stacked[3, 32:])


def test_tensors_are_requested_one_at_a_time(tmp_path):
    """A sharded role never holds two whole tensors."""
    save_architecture(FromConfig(ARCHITECTURES["qwen3_moe"]), tmp_path)
    requested = []

    def tensors():
        for name in ("model.norm.weight", "model.layers.0.mlp.experts.down_proj", "lm_head.weight"):
            requested.append(name)
            yield name, torch.zeros(4, 64, 32)

    published = PublishedNames(tmp_path)(tensors())
    assert requested == []
    assert next(published)[0] == "model.norm.weight"
    assert len(requested) == 1
    assert next(published)[0] == "model.layers.0.mlp.experts.0.down_proj.weight"
    assert len(requested) == 2
