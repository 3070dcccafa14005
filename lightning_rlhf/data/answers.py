"""Texts with a loss mask over their answers, shared by supervised, preference and unpaired data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.chat import Message, holds_messages
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.image_parts import images_of
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.images.store import ImageStore
from lightning_rlhf.types import SequenceBatch


class MaskedText(NamedTuple):
    """A tokenized text with its loss mask.

    Args:
        ids: token ids.
        loss_mask: True for each token of an answer; always False for the first token.
        images: numbers of the prompt's images among those of the data.
    """

    ids: list[int]
    loss_mask: list[bool]
    images: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Index of the first token of an answer."""
        return self.loss_mask.index(True)


class AnswersDataModule(RowsDataModule):
    """Base class for prompts with answers. See :class:`~lightning_rlhf.data.base.RowsDataModule`."""

    def mask_row(self, fields: Fields) -> MaskedText:
        """Tokenize a row's prompt and completion, or its conversation, without a length limit."""
        if "messages" in fields:
            return self.mask_messages(fields, self.messages(fields, "messages", "conversation"), "conversation")
        if holds_messages(fields["completion"]):
            markers = self.text_messages is not None and self.text_messages.markers is not None
            has_prompt = markers and "prompt" not in fields  # the text contains the prompt too
            before = [] if has_prompt else self.messages(fields, "prompt", "prompt")
            messages = [*before, *self.messages(fields, "completion", "completion", is_answer=bool(before))]
            return self.mask_messages(fields, messages, "conversation", first=len(before))
        text = fields.text("completion")
        if self.split_after is not None and "prompt" not in fields:
            prompt, answer = self.split(text)
            return self.mask_text(self.tokenize(prompt), answer)
        rendered = self.prompt_of(fields)
        masked = self.mask_text(self.tokenize(rendered.text), text)
        return masked._replace(images=self.number_images(rendered.images))

    def mask_text(self, prompt_ids: list[int], answer: str) -> MaskedText:
        """Concatenate a prompt, an answer and its end token; the loss mask covers the answer and its end token.

        Raises:
            BadRow: the answer has no token to learn, or the placeholder of an image.
        """
        answer_ids, end = self.tokenize(self.without_images(answer)), self.tokenizer.eos_token_id
        if answer_ids[-1:] != [end]:  # some data include the end token
            answer_ids = [*answer_ids, end]
        ids, start = [*prompt_ids, *answer_ids], max(len(prompt_ids), 1)
        if start == len(ids):
            raise BadRow("the text has a single token, which has no token before it to predict it from")
        return MaskedText(ids, [False] * start + [True] * (len(ids) - start))

    def mask_messages(self, fields: Fields, messages: Sequence[Message], label: str, first: int = 0) -> MaskedText:
        """Tokenize a conversation; the loss mask covers the assistant's messages.

        Args:
            fields: the row's fields.
            messages: messages of the conversation.
            label: name of the conversation in error messages.
            first: index of the first message that the loss mask may cover.
        """
        chat = self.chat(fields)
        ids, loss_mask = chat.tokenize_with_mask(messages, label, first)
        if self.tokenizer.unk_token_id in ids:
            self.note_unknown(chat.render(messages, label))
        return MaskedText(ids, loss_mask, self.number_images(images_of(messages)))

    def fit_text(self, text: MaskedText, label: str) -> MaskedText:
        """Return the text, cut to ``max_tokens`` if it is longer and ``too_long`` is a cut.

        Raises:
            BadRow: the text is too long and ``too_long`` is not a cut, or the cut leaves no token of the answer.
        """
        excess = self.excess(len(text.ids), label, has_images=bool(text.images))
        if not excess:
            return text
        ids, loss_mask = cut(text.ids, excess, self.too_long), cut(text.loss_mask, excess, self.too_long)
        loss_mask[0] = False  # the first token is not predicted from another token
        if not any(loss_mask):
            raise BadRow(
                f"{label} has {len(text.ids)} tokens; cutting it to {self.max_tokens} leaves no token of the answer",
                "the cut leaves no token of the answer",
            )
        self.count_cut(label)
        return MaskedText(ids, loss_mask)


def sequences(texts: Sequence[MaskedText], store: ImageStore | None = None) -> SequenceBatch:
    """Pad texts and their loss masks on the right to the longest text.

    Args:
        texts: texts of the batch.
        store: images of the data; None if the data have none.
    """
    ids, lengths = pad_right([text.ids for text in texts])
    loss_mask, _ = pad_right([text.loss_mask for text in texts])
    images = None if store is None else store.rows([text.images for text in texts])
    return SequenceBatch(ids, lengths, loss_mask.bool(), images)
