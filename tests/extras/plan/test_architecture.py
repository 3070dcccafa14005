"""Shapes are read from the model itself."""

from dataclasses import replace

import pytest

from lightning_rlhf.extras.plan.architecture import Layer, architecture
from lightning_rlhf.extras.plan.setup import Role
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.models.lora import LoRA
from tests.extras.plan.fakes import ARCHITECTURES, source


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameters_equal_those_of_the_real_model(kind):
    language_model, scalar = source(kind).causal(), source(kind).scalar()
    for made, config_of in ((language_model, False), (scalar, True)):
        shapes = architecture(source(kind).hf_config(), scalar=config_of)
        assert [parameter.shape for parameter in shapes.parameters] == [tuple(p.shape) for p in made.parameters()]
        assert shapes.elements == sum(p.numel() for p in made.parameters())
        assert shapes.vocabulary == (0 if config_of else 97)


def test_tied_head_is_counted_once():
    tied = architecture(source("qwen2", tie_word_embeddings=True).hf_config())
    assert architecture(source("qwen2").hf_config()).elements - tied.elements == 97 * 64


def test_widths_of_dense_layers_and_of_mixtures():
    dense = architecture(source("qwen2").hf_config())
    assert dense.layers == (Layer(64, 2, 64, 32, 4, head_norm=False, dense=192, packed=True),) * 2
    mixture = architecture(source("qwen3_moe").hf_config())
    assert (
        mixture.layers
        == (Layer(64, 2, 64, 32, 4, head_norm=True, dense=0, expert=48, experts=8, active=2, packed=True),) * 2
    )
    # Some layers of a mixture may be dense, and every token may pass a shared expert.
    mixed = architecture(source("qwen3_moe", mlp_only_layers=[0]).hf_config())
    assert [(layer.dense, layer.expert) for layer in mixed.layers] == [(192, 0), (0, 48)]
    shared = FromConfig(
        {
            "model_type": "qwen2_moe",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
        }
    )
    (layer,) = architecture(shared.hf_config()).layers
    assert (layer.dense, layer.expert, layer.experts, layer.active) == (40, 48, 4, 2)


def test_widths_of_latent_attention():
    """Queries and keys 4 x (12 + 8), values 4 x (12 + 20) in addition to the keys, outputs 4 x 20."""
    layer, _ = architecture(source("deepseek_v3").hf_config()).layers
    assert (layer.query, layer.key, layer.value, layer.output) == (80, 80, 128, 80)
    assert (layer.latents, layer.rotary, layer.norms) == ((24,), 8, 2)
    assert (layer.dense, layer.expert, layer.experts, layer.active) == (2 * 48, 48, 8, 2)
    both = architecture(source("deepseek_v3", q_lora_rank=10, first_k_dense_replace=1).hf_config()).layers
    assert [(one.latents, one.dense, one.experts) for one in both] == [((10, 24), 192, 0), ((10, 24), 96, 8)]


def test_cache_holds_keys_and_values_or_the_latent_vector():
    grouped, latent = (architecture(source(kind).hf_config()).layers[0] for kind in ("qwen2", "deepseek_v3"))
    assert [grouped.cache_elements(split) for split in (1, 2, 4)] == [2 * 2 * 16, 2 * 16, 2 * 16]
    assert [latent.cache_elements(split) for split in (1, 2, 4)] == [24 + 8] * 3


def test_units_are_the_layers_and_the_rest():
    units = architecture(source("qwen2").hf_config()).units
    assert set(units) == {None, 0, 1}
    assert [parameter.shape for parameter in units[None]] == [(97, 64), (64,), (97, 64)]


def test_tensor_parallelism_splits_by_the_plan_of_the_model():
    model = architecture(source("qwen2").hf_config(), tensor_parallel_size=2)
    layer = [(parameter.shape, parameter.split) for parameter in model.units[0]]
    assert layer == [
        ((64, 64), 0), ((64,), 0), ((32, 64), 0), ((32,), 0), ((32, 64), 0), ((32,), 0), ((64, 64), 1),
        ((192, 64), 0), ((192, 64), 0), ((64, 192), 1), ((64,), None), ((64,), None),
    ]  # fmt: skip
    assert all(parameter.split is None for parameter in model.units[None])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "whose MLP has gate_proj, up_proj and down_proj"),
        ({"model_type": "mamba"}, "similar attention layers; .* has a different structure"),
    ],
)
def test_unsupported_architecture_raises(fields, message):
    with pytest.raises(ValueError, match=f"^plan supports .*{message}"):
        architecture(FromConfig(fields).hf_config())


@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj"]])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_adapters_equal_those_of_peft(kind, targets):
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    adapted = replace(source(kind), lora=LoRA(4, 8, targets))
    for made, scalar in ((adapted.causal(), False), (adapted.scalar(), True)):
        role = Role("actor", architecture(adapted.hf_config(), scalar), True, lora_rank=4, lora_targets=targets)
        assert role.adapters == sum(p.numel() for p in made.parameters() if p.requires_grad)
