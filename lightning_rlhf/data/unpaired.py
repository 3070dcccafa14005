"""Answers that people judged one by one."""

from __future__ import annotations

import torch

from lightning_rlhf.data.answers import AnswersDataModule, Marked, sequences
from lightning_rlhf.data.columns import ANSWER, Fields
from lightning_rlhf.types import UnpairedBatch

_Judged = tuple[Marked, bool]


class UnpairedDataModule(AnswersDataModule):
    """Rows as :class:`~lightning_rlhf.data.conversations.ConversationDataModule` reads them, each with a ``label``.

    The label is true for an answer to give, false for one not to. See
    :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    gives = UnpairedBatch
    questions = (ANSWER, (("prompt", "prompt"),), (("label", "label"),))

    def convert(self, fields: Fields) -> _Judged:
        """The text with its answer marked, and whether it is desirable."""
        return self.fit_marked(self.answered(fields), "the text"), fields.flag("label")

    def tokens(self, example: _Judged) -> int:
        """Of prompt and completion."""
        return len(example[0].ids)

    def collate(self, examples: list[_Judged], numbers: list[int], places: list[int], epoch: int) -> UnpairedBatch:
        """Right-padded, answers marked."""
        texts, desirable = zip(*examples, strict=True)
        return UnpairedBatch(sequences(texts), torch.tensor(desirable), torch.tensor(places))
