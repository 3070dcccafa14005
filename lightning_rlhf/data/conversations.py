"""Prompts with answers to imitate."""

from __future__ import annotations

from lightning_rlhf.data.answers import AnswersDataModule, Marked, sequences
from lightning_rlhf.data.chat import holds_messages, messages_of
from lightning_rlhf.data.columns import ANSWER, AmbiguousColumns, Fields
from lightning_rlhf.types import SequenceBatch


class ConversationDataModule(AnswersDataModule):
    """Rows with ``prompt`` and ``completion``, whole conversations in ``messages`` or ``conversations``, or a ``text``.

    The loss is on the completion and its end token; in conversations on everything that an assistant says; of a text
    on all of it but its first token, and on its end token. With ``split_after``, the ``completion`` or the ``text``
    column holds prompt and answer in one (``columns: {completion: chosen}`` reads preference data).
    See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    gives = SequenceBatch
    questions = ((*ANSWER, ("text", "text")), (("prompt", "prompt"),))

    def convert(self, fields: Fields) -> Marked:
        """The text with what is learnt marked."""
        return self.fit_marked(self._text(fields) if "text" in fields else self.answered(fields), "the text")

    def _text(self, fields: Fields) -> Marked:
        if fields.get("prompt") is not None and "text" not in self.columns.given:
            prompt, text = fields.names["prompt"], fields.names["text"]
            raise AmbiguousColumns(
                f"{text!r} could be the answer to {prompt!r} or be learnt whole; say which, under data.init_args: "
                f"'columns: {{completion: {text}}}' or 'columns: {{text: {text}}}'"
            )
        if self.text_messages is not None and holds_messages(fields["text"]):
            return self.marked_messages(fields, messages_of(fields["text"], "text"), "conversation")
        text = fields.text("text")
        prompt, answer = self.split(text) if self.split_after is not None else ("", text)
        return self.marked_text(self.ids(prompt), answer)

    def tokens(self, example: Marked) -> int:
        """Of prompt and completion."""
        return len(example.ids)

    def collate(self, examples: list[Marked], numbers: list[int], places: list[int], epoch: int) -> SequenceBatch:
        """Right-padded; marked from the first completion token to the end token."""
        return sequences(examples)
