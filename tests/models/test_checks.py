"""Inconsistent model files, and files outside of the model's directory, are rejected before weights are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig, Pretrained
from tests.extras.plan.fakes import source
from tests.models.test_lora import GPT2


@pytest.fixture
def model(tmp_path):
    """A directory with a small model, whose weights file is named like one of several."""
    source("llama").causal().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    return tmp_path


@pytest.fixture
def tiny_tokenizer():
    return CharacterTokenizer("abc who?").load()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"a": "../x.safetensors"}},
            r"names '../x.safetensors': only .*safetensors files",
        ),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd': only .*safetensors files"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "names 'pytorch_model.bin': only .*safetensors files"),
        ({"weight_map": {"a": "other.safetensors"}}, "names 'other.safetensors', which is missing"),
        ({"weights": 1}, "model.safetensors.index.json is damaged: KeyError: 'weight_map'"),
        ([], "model.safetensors.index.json is damaged: TypeError"),
    ],
)
def test_index_may_refer_only_to_safetensors_in_its_directory(model, index, message):
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        Pretrained(str(model)).causal()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": 5}, "has architectures 5, expected a list of class names"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers -1, expected at least 1"),
        ({"vocab_size": "many"}, "cannot be read: .*'vocab_size' expected int, got str"),
        ({"hidden_size": 2**40}, "the weights of .* have other shapes than its config.json specifies"),
    ],
)
def test_invalid_sizes_are_rejected(model, fields, message):
    (model / "model-00001-of-00001.safetensors").rename(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=message):
        Pretrained(str(model)).causal()


def test_model_larger_than_memory_is_reported():
    with pytest.raises(ValueError, match="FromConfig needs more memory than this machine has"):
        source("llama", hidden_size=2**40).causal()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages|attr('__class__')|attr('__mro__') }}{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}{{ 1 // 0 }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_failing_template_makes_a_bad_row(template, tiny_tokenizer):
    tiny_tokenizer.chat_template = template
    with pytest.raises(BadRow, match="the chat template rejects the prompt: "):
        Chat(tiny_tokenizer).render([{"role": "user", "content": "who?"}], "prompt")


def test_tensors_that_are_loaded_are_not_called_left_out(tmp_path, caplog):
    FromConfig(GPT2, seed=0).causal().save_pretrained(tmp_path)
    Pretrained(str(tmp_path)).causal()
    assert "An export will not contain" not in caplog.text
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.h.0.attn.bias"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Pretrained(str(tmp_path)).causal()
    assert "GPT2LMHeadModel does not load transformer.h.0.attn.bias" in caplog.text


def test_gguf_is_named(tmp_path):
    (tmp_path / "model-q4.gguf").touch()
    for path in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(ValueError, match=r"model-q4.gguf is a GGUF file, which is not read"):
            Pretrained(str(path)).causal()
