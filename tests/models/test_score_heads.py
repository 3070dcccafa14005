"""Heads of reward models and critics of other libraries: the scores are those of their authors' formulas."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import relu
from transformers import AutoModel

from lightning_rlhf import GRPOModule, PPOModule
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.models.shared_bases import sharing
from tests.helpers import assert_close
from tests.stand_ins import TINY_LLAMA, TinyModel

HIDDEN = TINY_LLAMA["hidden_size"]
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])
INDEX = torch.arange(4).expand(2, 4)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


ROW, BIAS = normal(1, HIDDEN), torch.tensor([0.7])
TWO_LAYERS = {
    "score.0.weight": normal(HIDDEN, HIDDEN), "score.0.bias": normal(HIDDEN),
    "score.2.weight": ROW, "score.2.bias": BIAS,
}  # fmt: skip
# Name: architectures, further tensors, further fields of config.json, score of hidden states
CASES = {
    "OpenRLHF reward model": (["RewardModel"], {"score.weight": ROW}, {}, lambda h: h @ ROW[0]),
    "OpenRLHF value head": (["CriticModel"], {"value_head.weight": ROW}, {}, lambda h: h @ ROW[0]),
    "OpenRLHF normalised": (
        ["RewardModel"], {"value_head.weight": ROW}, {"mean": 0.5, "std": 2.0, "normalize_reward": True},
        lambda h: (h @ ROW[0] - 0.5) / 2,
    ),
    "OpenRLHF not normalised": (
        ["RewardModel"], {"value_head.weight": ROW}, {"mean": 0.5, "std": 2.0, "normalize_reward": False},
        lambda h: h @ ROW[0],
    ),
    "OpenRLHF other prefix": (
        ["RewardModel"], {"my_head.reward.weight": ROW}, {"value_head_prefix": "my_head.reward"}, lambda h: h @ ROW[0],
    ),
    "no architectures": (None, {"score.weight": ROW}, {}, lambda h: h @ ROW[0]),
    "two labels in config.json": (
        ["LlamaForSequenceClassification"], {"score.weight": ROW}, {"num_labels": 2}, lambda h: h @ ROW[0],
    ),
    "TRL": (
        ["LlamaForCausalLM"], {"v_head.summary.weight": ROW, "v_head.summary.bias": BIAS}, {},
        lambda h: h @ ROW[0] + 0.7,
    ),
    "classifier of tokens": (
        ["LlamaForTokenClassification"], {"score.weight": ROW, "score.bias": BIAS}, {}, lambda h: h @ ROW[0] + 0.7,
    ),
    "bias and scale": (
        ["RewardModel"], {"value_head.weight": ROW, "value_head.bias": BIAS},
        {"mean": 0.5, "std": 2.0, "normalize_reward": True}, lambda h: (h @ ROW[0] + 0.7 - 0.5) / 2,
    ),
    "Qwen2.5-Math-RM": (
        ["Qwen2ForRewardModel"], TWO_LAYERS, {},
        lambda h: relu(h @ TWO_LAYERS["score.0.weight"].T + TWO_LAYERS["score.0.bias"]) @ ROW[0] + 0.7,
    ),
}  # fmt: skip


def write(directory, architectures, head, fields=()):
    """Write a language model with a head in its files; return the path."""
    FromConfig(TINY_LLAMA, seed=0).causal().save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {**weights, **{name: tensor.clone() for name, tensor in head.items()}},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((directory / "config.json").read_text()) | {"architectures": architectures} | dict(fields)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def hidden(path):
    with torch.no_grad():
        return AutoModel.from_pretrained(path)(IDS).last_hidden_state


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    architectures, head, fields, score = CASES[request.param]
    path = write(tmp_path / "model", architectures, head, fields)
    return path, score(hidden(path))


def test_scores_are_those_of_the_authors(case):
    path, expected = case
    Pretrained(path).expect_head()
    assert_close(Pretrained(path).scalar()(IDS, INDEX), expected, rtol=1e-4, atol=1e-5)


def test_saved_head_has_the_same_scores(case, tmp_path):
    path, expected = case
    Pretrained(path).scalar().save_pretrained(tmp_path / "export")
    assert_close(Pretrained(str(tmp_path / "export")).scalar()(IDS, INDEX), expected, rtol=1e-4, atol=1e-5)


def test_adapter_beside_a_stored_head_has_the_same_scores(case, tmp_path):
    path, expected = case
    source = Pretrained(path, lora=LoRA(2, 4))
    model = source.scalar()
    assert_close(model(IDS, INDEX), expected, rtol=1e-4, atol=1e-5)
    weights = {name: tensor for name, tensor in model.lm.named_parameters() if "lora_" in name or "score" in name}
    save_adapter(source.lora, weights, tmp_path / "adapter", path, model.adapter_metadata)
    again = Pretrained(path, adapter=str(tmp_path / "adapter"))
    again.expect_head()
    assert_close(again.scalar()(IDS, INDEX), expected, rtol=1e-4, atol=1e-5)


def test_models_on_one_base_have_their_heads(case):
    path, expected = case
    with sharing({}):
        models = [Pretrained(path).scalar() for _ in range(2)]
    for model in models:
        assert_close(model(IDS, INDEX), expected, rtol=1e-4, atol=1e-5)
    heads = [{parameter.data_ptr() for parameter in model.lm.score.parameters()} for model in models]
    assert not heads[0] & heads[1]


def test_value_head_file_of_llama_factory_is_read(tmp_path):
    path = write(tmp_path / "model", ["LlamaForCausalLM"], {})
    save_file({"v_head.summary.weight": ROW, "v_head.summary.bias": BIAS}, tmp_path / "model/value_head.safetensors")
    assert_close(Pretrained(path).scalar()(IDS, INDEX), hidden(path) @ ROW[0] + 0.7, rtol=1e-4, atol=1e-5)


def test_value_head_file_beside_an_adapter_is_read(tmp_path):
    path = write(tmp_path / "model", ["LlamaForCausalLM"], {})
    source = Pretrained(path, lora=LoRA(2, 4))
    weights = {name: tensor for name, tensor in source.causal().lm.named_parameters() if "lora_" in name}
    save_adapter(source.lora, weights, tmp_path / "adapter", path)
    save_file({"v_head.summary.weight": ROW}, tmp_path / "adapter/value_head.safetensors")
    adapted = Pretrained(path, adapter=str(tmp_path / "adapter"))
    adapted.expect_head()
    assert_close(adapted.scalar()(IDS, INDEX), hidden(path) @ ROW[0], rtol=1e-4, atol=1e-5)


def test_head_of_a_hub_model_is_read_from_its_cache(tmp_path, monkeypatch):
    repository = tmp_path / "models--someone--judge"
    (repository / "snapshots").mkdir(parents=True)
    path = write(repository / "snapshots/abc", ["RewardModel"], {"value_head.weight": ROW})
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    source = Pretrained("someone/judge")
    source.expect_head()
    assert_close(source.scalar()(IDS, INDEX), Pretrained(path).scalar()(IDS, INDEX))


def test_pickled_value_head_is_an_error(tmp_path):
    path = write(tmp_path / "model", ["LlamaForCausalLM"], {})
    torch.save({"v_head.summary.weight": ROW}, tmp_path / "model/value_head.bin")
    with pytest.raises(
        ValueError, match=r"is in value_head.bin, a pickled file, .* write its tensors to value_head.saf"
    ):
        Pretrained(path).scalar()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            {"regression_layer.weight": normal(19, HIDDEN), "gating.layers.0.weight": normal(2, 2)},
            "gating.layers.0.weig",
        ),
        ({"score.weight": normal(10, HIDDEN)}, r"a classifier with 10 labels; .* score.weight has 10 outputs"),
        ({"score.weight": ROW, "normalizer.mean": BIAS}, r"of a kind that is not read, normalizer.mean, score.weight"),
        (
            {"v_head.summary.0.weight": ROW, "v_head.summary.2.weight": ROW},
            r"v_head.summary.0.weight, v_head.summary.2",
        ),
        ({"score.0.weight": ROW, "score.3.weight": ROW}, r"score.0.weight, score.3.weight: supported are one linear"),
        ({"out_proj.weight": ROW}, r"out_proj.weight"),
        ({"classifier.dense.weight": ROW, "classifier.out_proj.weight": ROW}, r"classifier.dense.weight"),
    ],
)
def test_other_heads_are_refused_by_name(tmp_path, head, message):
    path = write(tmp_path / "model", ["LlamaForCausalLM"], head)
    with pytest.raises(ValueError, match=message):
        Pretrained(path).scalar()


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "RewardModel", "CriticModel"])
def test_missing_head_of_a_reward_model_is_an_error(tmp_path, name):
    path = write(tmp_path / "model", [name], {})
    with pytest.raises(ValueError, match=rf"is a {name} by its config.json, but its files have no head for one number"):
        Pretrained(path).scalar()


def test_tensors_that_are_no_head_leave_a_critic_to_start_at_zero(tmp_path):
    others = {"mtp.layers.0.proj.weight": ROW, "medusa_head.0.linear.weight": ROW, "lm_head2.weight": ROW}
    path = write(tmp_path / "model", ["LlamaForCausalLM"], others)
    assert not Pretrained(path).scalar()(IDS, INDEX).any()


def test_frozen_reward_model_without_a_head_is_an_error(tmp_path):
    path = write(tmp_path / "model", ["LlamaForCausalLM"], {})
    for module in (GRPOModule, PPOModule):
        built = module(TinyModel(), reward_model=path)
        with pytest.raises(ValueError, match="is a language model without a head for one number, so that all rewards"):
            built.build_role("reward_model")


def test_scale_that_is_not_used_is_logged(tmp_path, caplog):
    fields = {"mean": 0.5, "std": 2.0, "normalize_reward": False}
    with caplog.at_level(logging.INFO):
        Pretrained(write(tmp_path / "model", ["RewardModel"], {"score.weight": ROW}, fields)).scalar()
    assert "mean 0.5 and std 2 are not used, because normalize_reward is false" in caplog.text


def test_deviation_of_zero_is_an_error(tmp_path):
    fields = {"mean": 0.5, "std": 0.0, "normalize_reward": True}
    path = write(tmp_path / "model", ["RewardModel"], {"score.weight": ROW}, fields)
    with pytest.raises(ValueError, match=r"has std 0.0, expected a positive number"):
        Pretrained(path).scalar()
