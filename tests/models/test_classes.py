"""Vision-language checkpoints trained on texts, and scalar models of architectures without such a class in
transformers."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from lightning_rlhf import FromConfig, Pretrained
from lightning_rlhf.models.classes import language_model_class
from tests.helpers import assert_close
from tests.stand_ins import TINY_LLAMA

TEXT = {
    "vocab_size": 18, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 48,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
}  # fmt: skip
TOKENS = {"image_token_id": 15, "video_token_id": 16, "vision_start_token_id": 14, "vision_end_token_id": 13}


def tensor_names(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.fixture
def checkpoint(tmp_path):
    """Write a small vision-language model."""

    def write(name):
        config = CONFIG_MAPPING[name](text_config=dict(TEXT), vision_config=dict(VISION), **TOKENS)
        AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3", "gemma3", "qwen3_5", "llama4"])
def test_text_model_of_a_vision_language_checkpoint_is_trained_and_everything_is_exported(checkpoint, name, tmp_path):
    directory = checkpoint(name)
    model = Pretrained(str(directory)).causal()
    ids = torch.randint(3, 12, (1, 9), generator=torch.Generator().manual_seed(0))
    index, targets = torch.arange(8).unsqueeze(0), ids[:, 1:]
    marked = torch.ones_like(targets, dtype=torch.bool)
    ours, instance = (model(ids, index, targets, marked, own_logits=item).logprobs for item in (False, True))
    assert_close(ours, instance, atol=1e-5)
    ours.sum().backward()
    towers = [parameter for key, parameter in model.lm.named_parameters() if "vision" in key or "visual" in key]
    assert towers
    assert not any(parameter.requires_grad for parameter in towers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    model.save_pretrained(tmp_path / "export")
    assert tensor_names(tmp_path / "export") == tensor_names(directory)


def test_tensors_that_an_export_omits_are_reported(checkpoint, caplog):
    """Qwen3.5 has heads that predict several tokens, which transformers does not load."""
    directory = checkpoint("qwen3_5")
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    Pretrained(str(directory)).causal()
    assert caplog.messages == [
        f"An export will not contain all of {directory}: Qwen3_5ForConditionalGeneration does not load mtp.fc.weight"
    ]


@pytest.mark.parametrize("name", ["cohere", "granite", "ernie4_5", "olmoe"])
def test_architecture_without_a_scalar_class_gets_a_linear_head(name, tmp_path):
    source = FromConfig(TINY_LLAMA | {"model_type": name, "num_experts": 2, "num_experts_per_tok": 1}, seed=3)
    model = source.scalar()
    weight = torch.linspace(-1, 2, 32)
    model.lm.score.weight.data[0] = weight
    ids = torch.tensor([[3, 4, 5]])
    scores = model(ids, torch.tensor([[0, 1, 2]]))
    hidden = model.lm.model(input_ids=ids).last_hidden_state
    assert_close(scores, hidden @ weight, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = Pretrained(str(tmp_path)).scalar()
    assert_close(again(ids, torch.tensor([[0, 1, 2]])), scores, rtol=1e-4, atol=1e-5)


def test_architecture_without_a_language_model_raises():
    with pytest.raises(ValueError, match=r"^transformers has no language model for the model_type 'vit'"):
        language_model_class(CONFIG_MAPPING["vit"]())
