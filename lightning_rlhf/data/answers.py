"""Texts whose answers are marked: what supervised, preference and unpaired data are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.chat import Message, chat_of, holds_messages, messages_of
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.types import SequenceBatch


class Marked(NamedTuple):
    """A text.

    Args:
        ids: token ids.
        said: of each token, whether it belongs to an answer; never the first.
    """

    ids: list[int]
    said: list[bool]

    @property
    def start(self) -> int:
        """The place of the first token of an answer."""
        return self.said.index(True)


class AnswersDataModule(RowsDataModule):
    """What reads prompts with answers. See :class:`~lightning_rlhf.data.base.RowsDataModule`."""

    def answered(self, fields: Fields) -> Marked:
        """A row's prompt and completion, or its conversation, of any length."""
        if "messages" in fields:
            return self.marked_messages(fields, messages_of(fields["messages"], "conversation"), "conversation")
        if holds_messages(fields["completion"]):
            markers = self.text_messages is not None and self.text_messages.markers is not None
            whole = markers and "prompt" not in fields  # a text that held the prompt too
            before = [] if whole else messages_of(fields["prompt"], "prompt")
            messages = [*before, *messages_of(fields["completion"], "completion")]
            return self.marked_messages(fields, messages, "conversation", first=len(before))
        text = fields.text("completion")
        if self.split_after is not None and "prompt" not in fields:
            prompt, answer = self.split(text)
        else:
            prompt, answer = self.prompt_of(fields)[0], text
        return self.marked_text(self.ids(prompt), answer)

    def marked_text(self, prompt_ids: list[int], answer: str) -> Marked:
        """A prompt and the answer behind it with its end token, which is what is marked.

        Raises:
            BadRow: there is no token in the answer to learn.
        """
        answer_ids, end = self.ids(answer), self.tokenizer.eos_token_id
        if answer_ids[-1:] != [end]:  # some data bring it along
            answer_ids = [*answer_ids, end]
        ids, start = [*prompt_ids, *answer_ids], max(len(prompt_ids), 1)
        if start == len(ids):
            raise BadRow("the text is one token, and nothing stands before it that could predict it")
        return Marked(ids, [False] * start + [True] * (len(ids) - start))

    def marked_messages(self, fields: Fields, messages: Sequence[Message], what: str, first: int = 0) -> Marked:
        """A conversation with what an assistant said in it marked.

        Args:
            fields: of the row.
            messages: of the conversation.
            what: it is, for what is said of it.
            first: message from which on is marked.
        """
        chat = chat_of(self.tokenizer, fields, self.chat_template_kwargs)
        ids, said = chat.marked(messages, what, first)
        if self.tokenizer.unk_token_id in ids:
            self.note_unknown(chat.render(messages, what))
        return Marked(ids, said)

    def fit_marked(self, text: Marked, what: str) -> Marked:
        """The text, cut to ``max_tokens`` if that is what is to be done with a longer one.

        Raises:
            BadRow: longer, and not to be cut; or nothing of the answer would be left.
        """
        excess = self.excess(len(text.ids), what)
        if not excess:
            return text
        ids, said = cut(text.ids, excess, self.too_long), cut(text.said, excess, self.too_long)
        said[0] = False  # nothing stands before it that could predict it
        if not any(said):
            raise BadRow(
                f"{what} has {len(text.ids)} tokens, and cut to {self.max_tokens} nothing of the answer is left",
                "nothing of the answer is left after the cut",
            )
        self.count_cut(what)
        return Marked(ids, said)


def sequences(texts: Sequence[Marked]) -> SequenceBatch:
    """Texts right-padded to the longest, their answers marked."""
    ids, lengths = pad_right([text.ids for text in texts])
    said, _ = pad_right([text.said for text in texts])
    return SequenceBatch(ids, lengths, said.bool())
