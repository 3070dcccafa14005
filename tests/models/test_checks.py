"""A model whose files contradict themselves or lead elsewhere is refused in a sentence, before its weights are read."""

import json

import pytest

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import Pretrained
from tests.tools.planning.fakes import source


@pytest.fixture
def model(tmp_path):
    """A directory with a small model, its weights called as one of several files."""
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
def test_an_index_leads_to_safetensors_beside_it_only(model, index, message):
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
def test_sizes_that_cannot_be_are_refused(model, fields, message):
    (model / "model-00001-of-00001.safetensors").rename(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=message):
        Pretrained(str(model)).causal()


def test_a_model_that_memory_does_not_hold_is_named():
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
def test_a_template_that_fails_or_that_the_sandbox_refuses_is_a_bad_row(template, tiny_tokenizer):
    tiny_tokenizer.chat_template = template
    with pytest.raises(BadRow, match="the chat template rejects the prompt: "):
        Chat(tiny_tokenizer).render([{"role": "user", "content": "who?"}], "prompt")
