"""A reward model with its own tokenizer returns the model's scores of the text."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, LlamaConfig

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.rewards.learned import LearnedReward
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction

TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
PROMPTS = ["ab", "b", "abcabcabc", "c", "aab"]
TEXTS = ["c", "abcab", "a", "bb", "cab"]


@pytest.fixture(params=["own padding", "no padding"])
def path(request, tmp_path):
    tokenizer = CharacterTokenizer("abc:;us").load()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
        initializer_range=0.5,
        pad_token_id=tokenizer.pad_token_id if request.param == "own padding" else None,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def own_scores(path, texts, end="</s>"):
    """Compute the model's score of each text separately, at the end token."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        return [model(**tokenizer(text + end, return_tensors="pt")).logits.item() for text in texts]


@pytest.mark.parametrize("batch_tokens", [1, 20, 10_000])
def test_scores_equal_the_model_s_for_any_batch_size(path, batch_tokens):
    result = LearnedReward(path, batch_tokens=batch_tokens)(PROMPTS, TEXTS)
    expected = own_scores(path, [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)])
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert len({round(score, 4) for score in expected}) == len(expected)


def test_messages_are_formatted_by_the_model_s_template(path):
    result = compute_reward(RewardFunction(LearnedReward(path), messages=True), prompts=PROMPTS, completions=TEXTS)
    expected = own_scores(path, [f"u:{prompt};a:{text};" for prompt, text in zip(PROMPTS, TEXTS, strict=True)])
    torch.testing.assert_close(result.tolist(), expected, atol=1e-5, rtol=0)


def test_response_that_was_cut_is_scored_at_its_last_token(path):
    texts = [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    cut = LearnedReward(path)(PROMPTS, TEXTS, finished=[False] * 5)
    torch.testing.assert_close(cut, own_scores(path, texts, end=""), atol=1e-5, rtol=0)
    rows = [[{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "c"}]]
    (score,) = LearnedReward(path)([rows[0]], [rows[1]], finished=[False])
    assert score == pytest.approx(own_scores(path, ["u:ab;c"], end="")[0], abs=1e-5)


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no user') }}", "{{ 1 // 0 }}"])
def test_failing_template_is_reported_with_its_model(path, template):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    rows = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    with pytest.raises(UsageError, match=r"^the chat template of .* rejects a conversation: "):
        LearnedReward(path)([rows[0]], [rows[1]])


def test_long_text_is_scored_by_its_end(path):
    (result,), (expected,) = LearnedReward(path, max_tokens=4)(["abcabc"], ["abc"]), own_scores(path, ["abc"])
    assert result == pytest.approx(expected, abs=1e-5)


def test_half_precision_is_close_to_full_precision(path):
    whole, half = LearnedReward(path)(PROMPTS, TEXTS), LearnedReward(path, dtype="bfloat16")(PROMPTS, TEXTS)
    torch.testing.assert_close(half, whole, atol=0.1, rtol=0.1)
    assert half != whole


def test_nothing_is_loaded_before_the_first_call():
    reward = LearnedReward("there/is/none")
    assert not RewardFunction(reward).supports_dry_run


def test_classifier_with_several_labels_raises_an_error(path, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a classifier with 3 labels; a critic or reward model needs one"):
        LearnedReward(str(tmp_path))(["a"], ["b"])
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        LearnedReward(path, batch_tokens=0)


def test_language_model_without_a_score_head_raises_an_error(path, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(path).base_model
    model.config.architectures, model.config.num_labels = None, 1
    model.save_pretrained(tmp_path / "lm")
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match="is a language model without a head for one number"):
        LearnedReward(str(tmp_path / "lm"))(["a"], ["b"])


def test_pickled_weights_are_not_read(path, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(path)
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "pickled")
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected safetensors, but pytorch_model.bin has pickled weights"):
        LearnedReward(str(tmp_path / "pickled"))(["a"], ["b"])


def test_missing_attention_kernels_raise_an_error_and_are_not_downloaded(path, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.models.loading.Pretrained.scalar", None)
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    with pytest.raises(ValueError, match="attn_implementation flash_attention_2 needs an NVIDIA GPU"):
        LearnedReward(path)(prompts=["a"], completions=["b"])


def test_encoder_scores_the_whole_text(path, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.cls_token = "<s>"
    tokenizer.save_pretrained(tmp_path / "encoder")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "encoder")
    directory = str(tmp_path / "encoder")
    expected = own_scores(directory, [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)], end="")
    torch.testing.assert_close(LearnedReward(directory)(PROMPTS, TEXTS), expected, atol=1e-5, rtol=0)
