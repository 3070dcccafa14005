"""Tokenizers: built ones are deterministic and decode to the encoded text; saved ones are loaded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from lightning_rlhf.data.tokenizers import BytePairTokenizer, CharacterTokenizer, TokenizerSource, load_tokenizer
from tests.helpers import properties

LETTERS = "0123456789+=: \nabcABC"
CHARACTERS = CharacterTokenizer(LETTERS).load()


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@properties
@given(st.text(LETTERS))
def test_characters_round_trip_one_token_each(text):
    tokens = ids(CHARACTERS, text)
    assert tokens == [4 + LETTERS.index(letter) for letter in text]
    assert CHARACTERS.decode(tokens) == text


def test_character_tokenizer_knows_its_special_tokens():
    assert (CHARACTERS.pad_token_id, CHARACTERS.bos_token_id, CHARACTERS.eos_token_id) == (0, 1, 2)
    assert ids(CHARACTERS, "1?2") == [5, CHARACTERS.unk_token_id, 6]
    assert CHARACTERS.decode([*ids(CHARACTERS, "1+2"), 2], skip_special_tokens=True) == "1+2"
    assert len(CHARACTERS) == 4 + len(LETTERS)


@pytest.mark.parametrize("characters", ["", "abca"])
def test_characters_must_be_unique_and_not_empty(characters):
    with pytest.raises(ValueError, match="characters must be non-empty and unique"):
        CharacterTokenizer(characters)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    words = ["the cat sat", "on the mat", "don't - ask , me . why ?", "naïve café", "日本語 🙂"]
    lines = [json.dumps({"a": words[i % 5], "b": words[i % 3] * 2, "n": i}) for i in range(60)]
    path = tmp_path_factory.mktemp("corpus") / "x.jsonl"
    path.write_text("\n".join([*lines, "not json", '{"a": "\\ud800"}']))
    return str(path)


@pytest.fixture(scope="module")
def pairs(corpus):
    return BytePairTokenizer(corpus, vocab_size=320).load()


@properties
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<" not in text)
)  # which may begin a special token
def test_byte_pairs_round_trip_any_text(pairs, text):
    assert pairs.decode(ids(pairs, text)) == text


def test_byte_pairs_keep_spaces_before_punctuation(pairs):
    assert pairs.decode(ids(pairs, "don't , ask . me ?")) == "don't , ask . me ?"


def test_same_data_give_the_same_byte_pairs(pairs, corpus):
    again = BytePairTokenizer(corpus, vocab_size=320).load()
    assert again.get_vocab() == pairs.get_vocab()
    assert len(pairs) <= 320
    assert len(ids(pairs, "the cat sat")) < 6


def test_byte_pairs_learn_only_from_the_given_columns(corpus, pairs):
    assert BytePairTokenizer(corpus, vocab_size=320, columns=["b"]).load().get_vocab() != pairs.get_vocab()
    with pytest.raises(ValueError, match=r"cannot train the tokenizer: .* has no text in the columns \['c'\]"):
        BytePairTokenizer(corpus, columns=["c"]).load()


def test_byte_pair_vocabulary_must_have_room_for_every_byte(corpus):
    with pytest.raises(ValueError, match="vocab_size must be at least 260, got 100"):
        BytePairTokenizer(corpus, vocab_size=100).load()


def test_saved_tokenizer_is_loaded_from_its_directory(pairs, tmp_path):
    pairs.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert ids(loaded, "the cat 🙂") == ids(pairs, "the cat 🙂")
    assert loaded.eos_token_id == 2


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
