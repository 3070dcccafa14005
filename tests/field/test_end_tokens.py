"""Responses end at all end tokens of tokenizer and model, wherever they are generated or learned."""

import json
import re

import pytest
import torch
import transformers
from tokenizers import AddedToken
from transformers import GenerationConfig

from lightning_rlhf import GRPOModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer, end_tokens, generation_ends
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.export.hf_export import _add_end_tokens
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.stand_ins import TINY_LLAMA, quiet_trainer

FURTHER = 9  # the token of f
CHAT = "{% for m in messages %}{{ m.content + ('f' if m.role == 'assistant' else '') }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that samples all tokens with the same probability, and ends at </s> or f."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = CharacterTokenizer("abcdef").load()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    config = transformers.AutoConfig.for_model(**{**TINY_LLAMA, "vocab_size": 10})
    lm = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        lm.lm_head.weight.zero_()
    lm.generation_config.eos_token_id = [2, FURTHER]
    lm.save_pretrained(path)
    return path


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_training_and_validation_stop_at_every_end_token(model, tmp_path):
    rows = [{"prompt": "abc"}] * 8
    data = PromptDataModule(InMemory(rows), str(model), val=InMemory(rows), batch_size=8)
    module = GRPOModule(Pretrained(str(model)), minibatch_size=32)
    loop = RolloutLoop(
        rewards=[RewardFunction(length)],
        engine=TransformersEngine(),
        group_size=4,
        max_response_tokens=40,
        stop_token_ids=[8],
        val_metric="length",
    )
    options = {"max_steps": 1, "default_root_dir": tmp_path, "use_distributed_sampler": False}
    trainer = quiet_trainer(callbacks=[loop], **options)
    trainer.fit(module, datamodule=data)
    rollout = module.last_step.experience.rollout
    ends = torch.isin(rollout.response_ids, torch.tensor([2, 8, FURTHER])) & rollout.response_mask
    last = rollout.response_ids[torch.arange(len(rollout)), rollout.response_lengths - 1]
    assert (ends.sum(dim=1) == (~rollout.truncated).long()).all()
    assert set(last[~rollout.truncated].tolist()) == {2, 8, FURTHER}
    assert trainer.callback_metrics["val/length_sampled"] < 20


def test_learned_answers_end_at_the_first_end_token_that_the_template_writes(model):
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    data = ConversationDataModule(InMemory([row]), str(model), batch_size=1)
    data.setup("fit")
    assert data.end_tokens == (2, FURTHER)
    assert data.examples["train"][0].ids[-1] == FURTHER
    assert data.end_token_warning() == ""


def test_text_that_ends_with_an_end_token_gets_no_second_one(model):
    data = ConversationDataModule(InMemory([{"prompt": "ab", "completion": "cdf"}]), str(model), batch_size=1)
    data.setup("fit")
    assert data.examples["train"][0].ids[-2:] == [7, FURTHER]


@pytest.mark.parametrize(("ends", "expected"), [(3, [3]), ([3, 4], [3, 4]), (None, [])])
def test_end_tokens_of_the_generation_settings(tmp_path, ends, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert generation_ends(str(tmp_path)) == expected
    assert generation_ends(str(tmp_path / "nothing")) == generation_ends(None) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": [2,', "generation_config.json is not a JSON object"),
        ("[]", "generation_config.json is not a JSON object"),
        ('{"eos_token_id": "</s>"}', "has eos_token_id ['</s>'], expected the id of a token"),
        ('{"eos_token_id": [[2, 9]]}', "has eos_token_id"),
        ('{"eos_token_id": [2.0]}', "has eos_token_id"),
    ],
)
def test_damaged_generation_settings_are_an_error(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        generation_ends(str(tmp_path))


def test_the_text_of_an_end_is_that_of_any_special_token():
    tokenizer = CharacterTokenizer("abcdef").load()
    tokenizer.add_tokens([AddedToken("<e>", special=True), AddedToken("<t>", special=False)])
    special, plain = tokenizer.convert_tokens_to_ids(["<e>", "<t>"])
    assert end_tokens(tokenizer, [[4, special], [4, plain], [4, 2], [4]], [True] * 4) == ["<e>", "", "</s>", ""]


def test_the_export_ends_where_training_did(tmp_path):
    GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    _add_end_tokens(tmp_path, (2, FURTHER))
    assert generation_ends(str(tmp_path)) == [FURTHER, 2]
