"""Tokenizers that are made for training from scratch."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.tokenizers import CharacterTokenizer, load_tokenizer
from lightning_rlhf.extras.tokenizers.byte_pairs import BytePairTokenizer
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
