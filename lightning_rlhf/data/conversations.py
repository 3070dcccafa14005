"""Prompts with answers to imitate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.rows import Row
from lightning_rlhf.types import SequenceBatch


class ConversationDataModule(RowsDataModule):
    """Rows with ``prompt`` and ``completion``; the loss is on the completion and its end token.

    With ``split_after``, the ``completion`` column holds prompt and answer in one text (``columns: {completion:
    chosen}`` reads preference data). See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    def convert(self, row: Row) -> tuple[list[int], int]:
        """Token ids and the number of prompt tokens among them."""
        completion = self.column(row, "completion")
        prompt, completion = self.split(completion) if self.split_after else (self.prompt_of(row), completion)
        prompt_ids = self.ids(prompt)
        ids = [*prompt_ids, *self.ids(completion), self.tokenizer.eos_token_id]
        return self.fit(ids, "the text"), max(len(prompt_ids), 1)

    def tokens(self, example: tuple[list[int], int]) -> int:
        """Of prompt and completion."""
        return len(example[0])

    def collate(
        self, examples: list[tuple[list[int], int]], numbers: list[int], places: list[int], epoch: int
    ) -> SequenceBatch:
        """Right-padded; marked from the first completion token to the end token."""
        texts, starts = zip(*examples, strict=True)
        return answers_marked(texts, starts)


def answers_marked(texts: Sequence[list[int]], starts: Sequence[int]) -> SequenceBatch:
    """Right-padded texts with everything from a start to the end of the text marked.

    Args:
        texts: B lists of token ids.
        starts: first marked token of each, at least 1.
    """
    ids, lengths = pad_right(texts)
    position = torch.arange(ids.shape[1]).unsqueeze(0)
    marked = (position >= torch.tensor(starts).unsqueeze(1)) & (position < lengths.unsqueeze(1))
    return SequenceBatch(ids, lengths, marked)
