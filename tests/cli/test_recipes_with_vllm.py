"""Each architecture of the recipes takes a complete step with vLLM, which then has the updated weights."""

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.cli.after_the_step import RECORDED, take_a_step
from tests.cli.published_architectures import PUBLISHED
from tests.cli.small_recipes import RECIPES, load_config, models_of, published, saved_tokenizer, shrunk

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE_OF = {
    "llama": "deepseek7b_gsm8k",
    "qwen2": "qwen2.5_0.5b_gsm8k",
    "qwen3": "qwen3_8b_grpo",
    "gemma2": "gemma2_2b",
    "qwen2_moe": "qwen1.5_moe_gsm8k",
    "qwen3_moe": "qwen3_30b_a3b_grpo",
    "deepseek_v3": "moonlight_16b_a3b_gsm8k",
}


def test_table_has_every_architecture_of_the_recipes_without_images():
    architectures = [architecture for architecture, _ in PUBLISHED.values() if "vision_config" not in architecture]
    assert RECIPE_OF.keys() == {architecture["model_type"] for architecture in architectures}


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("kind", RECIPE_OF)
def test_vllm_answers_with_the_updated_weights_after_a_step(kind, fit, tmp_path):
    pytest.importorskip("math_verify")
    (path,) = (path for path in RECIPES if path.stem == RECIPE_OF[kind])
    assert published(models_of(load_config(path))["actor"])["model_type"] == kind
    engine = {"class_path": "lightning_rlhf.rollout.vllm.engine.VLLMEngine"}
    config = shrunk(path, saved_tokenizer(tmp_path / "tokenizer"), None, engine)
    config["model"]["init_args"]["optimizer"]["lr"] = 0.01  # so that old weights would be noticed
    take_a_step(fit, config)
    assert RECORDED["difference"] is None
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"} <= set(RECORDED["moved"])
    if "moe" in kind or kind == "deepseek_v3":
        assert {f"model.layers.1.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")} <= set(
            RECORDED["moved"]
        )
