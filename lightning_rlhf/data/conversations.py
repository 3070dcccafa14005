"""Prompts with answers to imitate."""

from __future__ import annotations

from lightning_rlhf.data.answers import AnswersDataModule, Marked, sequences
from lightning_rlhf.data.columns import ANSWER, Fields
from lightning_rlhf.types import SequenceBatch


class ConversationDataModule(AnswersDataModule):
    """Rows with ``prompt`` and ``completion``, or with whole conversations in ``messages`` or ``conversations``.

    The loss is on the completion and its end token; in conversations on everything that an assistant says. With
    ``split_after``, the ``completion`` column holds prompt and answer in one text (``columns: {completion: chosen}``
    reads preference data). See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    questions = (ANSWER, (("prompt", "prompt"),))

    def convert(self, fields: Fields) -> Marked:
        """The text with its answer marked."""
        return self.fit_marked(self.answered(fields), "the text")

    def tokens(self, example: Marked) -> int:
        """Of prompt and completion."""
        return len(example.ids)

    def collate(self, examples: list[Marked], numbers: list[int], places: list[int], epoch: int) -> SequenceBatch:
        """Right-padded; marked from the first completion token to the end token."""
        return sequences(examples)
