"""Prompts with answers, for supervised fine-tuning."""

from __future__ import annotations

from lightning_rlhf.data.answers import AnswersDataModule, MaskedText, sequences
from lightning_rlhf.data.columns import ANSWER, AmbiguousColumns, Fields
from lightning_rlhf.data.messages import holds_messages
from lightning_rlhf.types import SequenceBatch


class ConversationDataModule(AnswersDataModule):
    """Rows with ``prompt`` and ``completion``, whole conversations in ``messages`` or ``conversations``, or a ``text``.

    The loss covers the completion and its end token, all messages of the assistant in a conversation, or all tokens of
    a text except the first, and its end token. The end token is added to completions and texts that do not end with it,
    except after ``cut_end``; no token is added at the beginning. With ``split_after``, the ``completion`` or the
    ``text`` column contains prompt and answer (``columns: {completion: chosen}`` reads preference data), unless the row
    has a ``prompt`` column.

    If the chat template has ``{% generation %}`` marks, transformers builds the mask from them, which ends with a
    turn's end token. With other templates, the conversation is rendered up to each turn and before it, and the
    difference is the turn's text. The text after the last answer is removed; if the template writes no end token
    there, one is added. A template that renders a turn differently when more messages follow makes one text of each
    turn, of at most ``max_tokens`` each; their common beginning is computed once where texts are packed. See
    :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    batch_type = SequenceBatch
    field_candidates = ((*ANSWER, ("text", "text")), (("prompt", "prompt"),))

    def convert(self, fields: Fields) -> MaskedText:
        """Tokenize a row; the loss mask covers the tokens to learn."""
        return self.fit_text(self._text(fields) if "text" in fields else self.mask_row(fields), "the text")

    def _text(self, fields: Fields) -> MaskedText:
        if fields.get("prompt") is not None and "text" not in self.columns.mapping:
            prompt, text = fields.names["prompt"], fields.names["text"]
            raise AmbiguousColumns(
                f"{text!r} could be the answer to {prompt!r} or a text to learn as a whole; set one of the two under "
                f"data.init_args: 'columns: {{completion: {text}}}' or 'columns: {{text: {text}}}'"
            )
        if self.text_messages is not None and holds_messages(fields["text"]):
            return self.mask_messages(fields, self.messages(fields, "text", "text"), "conversation")
        text = fields.text("text")
        self.check_plain_text(fields)
        prompt, answer = self.split(text) if self.split_after is not None else ("", text)
        return self.mask_text(self.tokenize(prompt), answer)

    def count_tokens(self, example: MaskedText) -> int:
        """Count the tokens of a row's texts."""
        return len(example.ids)

    def count_longest_text(self, example: MaskedText) -> int:
        """Count the tokens of the longest text of a row."""
        return example.longest

    def collate(
        self, examples: list[MaskedText], numbers: list[int], positions: list[int], epoch: int
    ) -> SequenceBatch:
        """Pad the texts and their loss masks on the right."""
        return sequences(examples, self.image_store)
