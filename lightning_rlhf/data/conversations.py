"""Prompts with answers, for supervised fine-tuning."""

from __future__ import annotations

from lightning_rlhf.data.answers import AnswersDataModule, MaskedText, sequences
from lightning_rlhf.data.columns import ANSWER, AmbiguousColumns, Fields
from lightning_rlhf.data.messages import holds_messages
from lightning_rlhf.types import SequenceBatch


class ConversationDataModule(AnswersDataModule):
    """Reads rows with ``prompt`` and ``completion``, conversations in ``messages`` or ``conversations``, or a ``text``.

    Use it for SFT. The loss covers the completion and its end token, all messages of the assistant in a conversation,
    or all tokens of a text except the first, and its end token. If a completion or text does not end with the end
    token, it is added, except after ``cut_end``. No token is added at the beginning.

    Set ``split_after`` if the ``completion`` or the ``text`` column contains prompt and answer. For example,
    ``columns: {completion: chosen}`` reads preference data. It does not apply to rows with a ``prompt`` column.

    If your chat template contains ``{% generation %}`` marks, transformers builds the mask from them, and it ends with
    a turn's end token. With other templates, the conversation is rendered up to each turn and before it, and the
    difference is the turn's text. The text after the last answer is removed. If the template writes no end token there,
    one is added.

    Some templates render a turn differently when more messages follow. Each turn then becomes a text of its own, of at
    most ``max_tokens``, with the prompt that the engine would get at that point. Their common beginning is computed
    once if texts are packed. If a template writes ``<think>`` into the prompt and removes thoughts from answers, put
    the thoughts into the content yourself: ``<think>hm</think>so``.

    If rows contain both ``prompt`` and ``text``, say what ``text`` is: ``columns: {completion: text}`` if it is the
    answer, ``columns: {text: text}`` if it is the whole text. For the arguments, see
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
