"""Saved tokenizers are loaded, or an error says why not."""

import pytest
from transformers import AutoConfig

from lightning_rlhf.data.tokenizers import CharacterTokenizer, TokenizerSource, load_tokenizer

LETTERS = "0123456789+=: \nabcABC"
CHARACTERS = CharacterTokenizer(LETTERS).load()


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("path", ["./nothing", "runs/a/export", "nothing"])
def test_missing_tokenizer_raises_a_one_line_error(path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .* expected a directory that save_pretrained wrote"):
        load_tokenizer(path)


def test_directory_without_tokenizer_files_is_not_treated_as_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/sft").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no tokenizer at 'runs/sft'"):
        load_tokenizer("runs/sft")


def test_unreachable_hub_id_raises_a_one_line_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"^no tokenizer at 'missing/tokenizer': .* could not be loaded from the hub: "
    ):
        load_tokenizer("missing/tokenizer")


def test_tokenizer_without_an_end_token_is_rejected():
    class Endless:
        def load(self):
            tokenizer = CharacterTokenizer("ab").load()
            tokenizer.eos_token = None
            return tokenizer

    assert isinstance(Endless(), TokenizerSource)
    with pytest.raises(ValueError, match="has no end-of-sequence token; responses could never end"):
        load_tokenizer(Endless())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("config.json", '{"model_type": "llama", "vocab_size": "many"}'),
        ("config.json", "3"),
    ],
)
def test_damaged_tokenizer_files_raise_a_one_line_error(tmp_path, file, content):
    CharacterTokenizer("ab").load().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=r"^the tokenizer in '.*' cannot be read, its files are damaged: ") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_tokenizer_that_changes_when_transformers_reloads_it_is_rejected(tmp_path):
    CHARACTERS.save_pretrained(tmp_path)
    assert ids(load_tokenizer(str(tmp_path)), "1 + 2") == ids(CHARACTERS, "1 + 2")
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)  # transformers now takes Qwen2's class
    with pytest.raises(ValueError, match="was loaded as Qwen2Tokenizer, which splits texts"):
        load_tokenizer(str(tmp_path))


def test_chat_template_beside_a_processor_is_read(tmp_path):
    saved = CharacterTokenizer("abc").load()
    saved.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    file = tmp_path / "chat_template.json"
    file.write_text('{"chat_template": "{{ messages[0].content }}"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False) == "cab"
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"the chat_template\.json of .* cannot be read"):
        load_tokenizer(str(tmp_path))
