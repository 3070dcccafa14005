"""Single answers labelled as desirable or undesirable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.data.answers import AnswersDataModule, MaskedText, sequences
from lightning_rlhf.data.columns import ANSWER, Fields
from lightning_rlhf.types import SequenceBatch, TensorBatch, expect_shape

_LabelledText = tuple[MaskedText, bool]


@dataclass(frozen=True)
class UnpairedBatch(TensorBatch):
    """Texts that are labelled individually as desirable or not.

    Args:
        texts: B prompts with responses; the loss mask covers the responses.
        desirable: (B,) bool, True for desirable responses.
        position: (B,) int64, position of each text in the global batch, in whose order KTO pairs each prompt with the
            response of the next text.
    """

    texts: SequenceBatch
    desirable: Tensor
    position: Tensor

    def __post_init__(self) -> None:
        expect_shape("UnpairedBatch.desirable", self.desirable, self.texts.lengths.shape)
        expect_shape("UnpairedBatch.position", self.position, self.texts.lengths.shape)

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of each text."""
        return self.texts.lengths


class UnpairedDataModule(AnswersDataModule):
    """Reads single answers with a ``label`` for KTO: true for a desirable answer, false for an undesirable one.

    Your rows look as for :class:`~lightning_rlhf.data.conversations.ConversationDataModule`. See
    :class:`~lightning_rlhf.data.base.RowsDataModule` for the options.
    """

    batch_type = UnpairedBatch
    field_candidates = (ANSWER, (("prompt", "prompt"),), (("label", "label"), ("label", "kto_tag")))

    def convert(self, fields: Fields) -> _LabelledText:
        """Tokenize a row; return the text with its loss mask and its label."""
        return self.fit_text(self.mask_row(fields), "the text"), fields.flag("label")

    def count_tokens(self, example: _LabelledText) -> int:
        """Count the tokens of prompt and completion."""
        return len(example[0].ids)

    def count_longest_text(self, example: _LabelledText) -> int:
        """Count the tokens of the longest text of a row."""
        return example[0].longest

    def collate(
        self, examples: list[_LabelledText], numbers: list[int], positions: list[int], epoch: int
    ) -> UnpairedBatch:
        """Pad the texts and their loss masks on the right."""
        texts, desirable = zip(*examples, strict=True)
        return UnpairedBatch(sequences(texts, self.image_store), torch.tensor(desirable), torch.tensor(positions))
