"""A reward model whose head has another library's name, or another class in config.json, is not scored with zeros."""

import json

import torch
from safetensors.torch import load_file, save_file

from lightning_rlhf import Pretrained
from lightning_rlhf.models.loading import FromConfig
from tests.stand_ins import TINY_LLAMA


def test_reward_model_of_openrlhf_has_its_scores(tmp_path):
    model = FromConfig(TINY_LLAMA, seed=0).scalar()
    torch.nn.init.ones_(model.lm.score.weight)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["RewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids, index = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])
    scores = Pretrained(str(tmp_path)).scalar()(ids, index)
    torch.testing.assert_close(scores, model(ids, index))
    assert scores.any()
