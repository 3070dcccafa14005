"""Attention is that of the architecture, also where transformers' default kernel leaves a part of it away."""

import torch

from lightning_rlhf.models.loading import FromConfig, Pretrained, save_architecture
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers_engine import TransformersEngine
from tests.cli.published_architectures import GEMMA2_2B, SMALL

SOURCE = FromConfig(GEMMA2_2B | SMALL["gemma2"] | {"vocab_size": 50, "initializer_range": 0.3}, seed=0)
IDS = torch.arange(40).view(2, 20)


@torch.no_grad()
def test_gemma_2_caps_its_attention_logits_as_it_was_trained_to(tmp_path):
    lm = SOURCE.causal().lm.eval()
    capped = lm(IDS).logits
    lm.config.attn_logit_softcapping = None
    for layer in lm.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (lm(IDS).logits - capped).abs().max() > 0.01
    SOURCE.causal().save_pretrained(tmp_path)
    assert torch.equal(Pretrained(str(tmp_path)).causal().lm.eval()(IDS).logits, capped)


def test_the_actor_the_critic_and_the_engine_beside_them_have_the_same_attention(tmp_path):
    save_architecture(SOURCE, tmp_path)
    engine = TransformersEngine()
    engine.start(EngineSetup(tmp_path, "float32", 40, tmp_path / "log"))
    for model in (SOURCE.causal().lm, SOURCE.scalar().lm, engine._model):
        assert model.config._attn_implementation == "eager"
    assert FromConfig({"model_type": "llama"}).hf_config()._attn_implementation != "eager"
