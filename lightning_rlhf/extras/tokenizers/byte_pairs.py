"""Byte-pair encoding for models that are trained from scratch."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_rlhf.data.columns import is_unicode
from lightning_rlhf.data.rows import as_rows
from lightning_rlhf.data.tokenizers import SPECIAL_TOKENS
from lightning_rlhf.expected_errors import UsageError


@dataclass(frozen=True)
class BytePairTokenizer:
    """Trains byte-pair encoding on the run's own data. It can encode any text.

    Args:
        data: file or hub id of the training data.
        vocab_size: number of tokens, at least 260 (256 bytes and four special tokens).
        columns: text columns to train on. None uses all of them.
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
            special_tokens=list(SPECIAL_TOKENS.values()),
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
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)
