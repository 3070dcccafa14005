"""Construction of new tokenizers, for training from scratch."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_rlhf.data.columns import is_unicode
from lightning_rlhf.data.rows import as_rows
from lightning_rlhf.expected_errors import UsageError

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


_TURNS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class CharacterTokenizer:
    """A tokenizer with one token per character.

    Args:
        characters: unique characters of the vocabulary; other characters become ``<unk>``. Their ids follow those of
            the special tokens: pad 0, begin 1, end 2, unknown 3.
        chat: whether the tokenizer has a chat template, of the texts of all messages, and an end token after each of
            the assistant's.
    """

    characters: str
    chat: bool = False

    def __post_init__(self) -> None:
        if len(set(self.characters)) != len(self.characters) or not self.characters:
            raise UsageError(f"characters must be non-empty and unique, got {self.characters!r}")

    def load(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        vocabulary = {token: i for i, token in enumerate([*_SPECIAL.values(), *self.characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        template = {"chat_template": _TURNS} if self.chat else {}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL, **template)


@dataclass(frozen=True)
class BytePairTokenizer:
    """Byte-pair encoding trained on the run's own data; any text can be encoded.

    Args:
        data: file or hub id of the training data.
        vocab_size: number of tokens, at least 260 (256 bytes and four special tokens).
        columns: text columns to train on; None uses all of them.
    """

    data: str
    vocab_size: int = 4096
    columns: list[str] | None = None

    def load(self) -> PreTrainedTokenizerBase:
        """Train the tokenizer; the same data gives the same tokenizer.

        Raises:
            ValueError: ``vocab_size`` is too small, or the data have no text.
        """
        if self.vocab_size < 260:
            raise UsageError(f"vocab_size must be at least 260, got {self.vocab_size}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=list(_SPECIAL.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = [
            value
            for _, row in as_rows(self.data).rows()
            if isinstance(row, dict)
            for column, value in row.items()
            if isinstance(value, str) and (self.columns is None or column in self.columns) and is_unicode(value)
        ]
        if not texts:
            columns = "any column"
            if self.columns is not None:
                columns = f"the columns {self.columns}"
            raise UsageError(f"cannot train the tokenizer: {self.data!r} has no text in {columns}")
        tokenizer.train_from_iterator(texts, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL)
