"""Attention follows the architecture, even where the default kernel of transformers omits a part."""

import re

import pytest
import torch

from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.rewards.learned import LearnedReward
from lightning_rlhf.models import attention
from lightning_rlhf.models.loading import FromConfig, Pretrained, save_architecture
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.cli.published_architectures import GEMMA2_2B, SMALL

SOURCE = FromConfig(GEMMA2_2B | SMALL["gemma2"] | {"vocab_size": 50, "initializer_range": 0.3}, seed=0)
TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50,
        "num_attention_heads": 2}  # fmt: skip
IDS = torch.arange(40).view(2, 20)


@torch.no_grad()
def test_gemma_2_caps_its_attention_logits(tmp_path):
    lm = SOURCE.causal().lm.eval()
    capped = lm(IDS).logits
    lm.config.attn_logit_softcapping = None
    for layer in lm.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (lm(IDS).logits - capped).abs().max() > 0.01
    SOURCE.causal().save_pretrained(tmp_path)
    assert torch.equal(Pretrained(str(tmp_path)).causal().lm.eval()(IDS).logits, capped)


def test_roles_and_engine_cap_the_attention_logits(tmp_path):
    save_architecture(SOURCE, tmp_path)
    engine = TransformersEngine()
    engine.start(EngineSetup(tmp_path, "float32", 40, tmp_path / "log"))
    for model in (SOURCE.causal().lm, SOURCE.scalar().lm):
        assert model.config._attn_implementation == "packed"
    assert engine._model.config._attn_implementation == "eager"  # its attention reads a cache
    assert FromConfig({"model_type": "llama"}).hf_config()._attn_implementation != "eager"


@torch.no_grad()
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_implementation_of_a_pretrained_model_can_be_set(tmp_path, name):
    FromConfig(TINY, seed=0).causal().save_pretrained(tmp_path)
    model = Pretrained(str(tmp_path), attn_implementation=name).causal().lm
    assert model.config._attn_implementation == name
    assert torch.allclose(model.eval()(IDS).logits, Pretrained(str(tmp_path)).causal().lm.eval()(IDS).logits, atol=1e-6)


@pytest.fixture
def asking(tmp_path):
    """A directory whose config.json requests compiled code from the hub."""
    FromConfig(TINY, seed=0).scalar().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"attn_implementation": "kernels-community/flash-attn",', 1))
    return tmp_path


def test_code_from_the_hub_requested_by_a_configuration_is_rejected(asking):
    requests_kernel = re.escape(
        "requests attn_implementation 'kernels-community/flash-attn', expected one of eager, sdpa, flash"
    )
    with pytest.raises(ValueError, match=requests_kernel):
        Pretrained(str(asking)).scalar()
    with pytest.raises(ValueError, match=requests_kernel):
        FromConfig(TINY | {"attn_implementation": "kernels-community/flash-attn"}).causal()
    with pytest.raises(ValueError, match=requests_kernel):
        LearnedReward(str(asking))(prompts=["a"], completions=["b"])
    with pytest.raises(ValueError, match=requests_kernel):
        TransformersEngine().start(EngineSetup(asking, "float32", 40, asking / "log"))
    chosen = Pretrained(str(asking), attn_implementation="sdpa").scalar()
    assert chosen.lm.config._attn_implementation == "sdpa"


def test_missing_flash_attention_is_not_downloaded_and_can_be_planned(tmp_path, monkeypatch):
    FromConfig(TINY, seed=0).causal().save_pretrained(tmp_path)
    monkeypatch.setitem(attention._FLASH, "flash_attention_2", lambda: False)
    source = Pretrained(str(tmp_path), attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="flash_attention_2 needs an NVIDIA GPU and the package flash-attn"):
        source.causal()
    assert len(architecture(source.hf_config()).layers) == 1
