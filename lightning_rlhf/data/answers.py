"""Texts with a loss mask over their answers, shared by supervised, preference and unpaired data."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.base import PromptText, RowsDataModule
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.image_parts import images_of, text_of_content
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.messages import Message, common_prefix, holds_messages
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.turns import TokenizedText, tokenize_turns
from lightning_rlhf.images import ImageStore
from lightning_rlhf.types import SequenceBatch


class MaskedText(NamedTuple):
    """The tokens of a row with their loss mask; a conversation can be several texts, one for each turn to learn.

    Args:
        ids: token ids; of several texts, one behind the other.
        loss_mask: true for each token of an answer; always False for the first token of a text.
        images: numbers of the texts' images among those of the data.
        starts: indices at which further texts begin.
    """

    ids: Sequence[int]
    loss_mask: Sequence[int]
    images: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def first_answer_token(self) -> int:
        """Index of the first token of an answer."""
        return self.loss_mask.index(True)

    @property
    def texts(self) -> list[TokenizedText]:
        """The tokens and the loss mask of each text."""
        bounds = itertools.pairwise([0, *self.starts, len(self.ids)])
        return [(list(self.ids[first:last]), list(map(bool, self.loss_mask[first:last]))) for first, last in bounds]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return max(len(ids) for ids, _ in self.texts)

    @property
    def shared(self) -> int:
        """Number of first tokens that all texts have in common, none of them to learn; 0 for one text or with images.

        Attention to the tokens of an image is computed for each text.
        """
        texts = self.texts
        if len(texts) < 2 or self.images:
            return 0
        common = min(common_prefix(texts[0][0], ids) for ids, _ in texts)
        return min(common, *(mask.index(True) for _, mask in texts))

    @classmethod
    def joined(cls, texts: Sequence[TokenizedText], images: tuple[int, ...] = ()) -> MaskedText:
        """Return a row of texts; several, each with its own prompt, are stored with 5 bytes per token."""
        if len(texts) == 1:
            return cls(*texts[0], images)
        starts = itertools.accumulate(len(ids) for ids, _ in texts[:-1])
        chain = itertools.chain.from_iterable
        ids, mask = array("i", chain(ids for ids, _ in texts)), bytearray(chain(mask for _, mask in texts))
        return cls(ids, mask, images, tuple(starts))


class AnswersDataModule(RowsDataModule):
    """Base class for prompts with answers. See :class:`~lightning_rlhf.data.base.RowsDataModule`."""

    def mask_row(self, fields: Fields) -> MaskedText:
        """Tokenize a row's prompt and completion, or its conversation, without a length limit."""
        if "messages" in fields:
            messages = self.messages(fields, "messages", "conversation")
            self._check_prompt_within(fields, messages)
            return self.mask_messages(fields, messages, "conversation")
        if holds_messages(fields["completion"]):
            markers = self.text_messages is not None and self.text_messages.markers is not None
            has_prompt = markers and "prompt" not in fields  # the text contains the prompt too
            if not has_prompt and isinstance(fields["prompt"], str):
                raise BadRow(
                    "the completion is messages, and the prompt is text: set data.init_args.as_messages: true, which "
                    "makes a message of the prompt",
                    "the completion is messages, and the prompt is text",
                )
            before = [] if has_prompt else self.messages(fields, "prompt", "prompt")
            messages = [*before, *self.messages(fields, "completion", "completion", is_answer=bool(before))]
            return self.mask_messages(fields, messages, "conversation", first=len(before))
        text = fields.text("completion")
        if self.split_after is not None and "prompt" not in fields:
            self.check_plain_text(fields)
            prompt, answer = self.split(text)
            return self.mask_text(self.tokenize(prompt), answer)
        return self.mask_answer(fields, self.prompt_of(fields), text)

    def mask_answer(self, fields: Fields, prompt: PromptText, answer: str) -> MaskedText:
        """Tokenize a prompt with an answer that is text; the template may have to render it as a message."""
        if prompt.messages and self.chat(fields).writes_before(prompt.messages, answer):
            for end in self.tokenizer.convert_ids_to_tokens(list(self.end_tokens)):
                answer = answer.removesuffix(end)  # some data include it
            message = {"role": "assistant", "content": answer}
            return self.mask_messages(fields, [*prompt.messages, message], "conversation", len(prompt.messages))
        return self.mask_text(self.tokenize(prompt.text), answer)._replace(images=self.number_images(prompt.images))

    @staticmethod
    def _check_prompt_within(fields: Fields, messages: Sequence[Message]) -> None:
        """Check that a text prompt beside a conversation is a part of it."""
        prompt = fields.get("prompt")
        texts = [text_of_content(message["content"]) for message in messages]
        if isinstance(prompt, str) and not any(prompt.strip() in text for text in texts):
            column, other = fields.names["prompt"], fields.names["messages"]
            raise BadRow(
                f"the column {other!r} has a conversation without the text of the column {column!r}; to leave one "
                f"of them out, set data.init_args.columns: {{{column}: null}} or {{{other}: null}}",
                f"the prompt in the column {column!r} is not in the conversation",
            )

    def mask_text(self, prompt_ids: list[int], answer: str) -> MaskedText:
        """Concatenate a prompt, an answer and its end token; the loss mask covers the answer and its end token.

        Raises:
            BadRow: the answer has no token to learn, or the placeholder of an image.
        """
        answer_ids = self.tokenize(self.without_images(answer))
        if not answer_ids or answer_ids[-1] not in self.end_tokens:  # some data include the end token
            answer_ids = [*answer_ids, self.end_tokens[0]]
        ids, start = [*prompt_ids, *answer_ids], max(len(prompt_ids), 1)
        if start == len(ids):
            raise BadRow("the text has a single token, which has no token before it to predict it from")
        return MaskedText(ids, [False] * start + [True] * (len(ids) - start))

    def mask_messages(self, fields: Fields, messages: Sequence[Message], label: str, first: int = 0) -> MaskedText:
        """Tokenize a conversation; the loss mask covers the assistant's messages.

        Args:
            fields: the row's fields.
            label: name of the conversation in error messages.
            first: index of the first message that the loss mask may cover.
        """
        chat = self.chat(fields)
        texts, notes = tokenize_turns(chat, messages, label, first)
        self.note(*notes)
        if any(self.tokenizer.unk_token_id in ids for ids, _ in texts):
            self.note_unknown(chat.render(messages, label))
        images = self.number_images(images_of(messages))
        if images and len(texts) > 1:
            raise BadRow(
                f"the {label} has images, and the chat template needs a text of its own for each turn to learn"
            )
        return MaskedText.joined(texts, images)

    def fit_text(self, text: MaskedText, label: str) -> MaskedText:
        """Return the text, cut to ``max_tokens`` if it is longer and ``too_long`` is a cut.

        Raises:
            BadRow: the text is too long and ``too_long`` is not a cut, or the cut leaves no token of the answer.
        """
        if not self.excess(text.longest, label, has_images=bool(text.images)):
            return text
        return MaskedText.joined([self._fit(ids, loss_mask, label) for ids, loss_mask in text.texts])

    def _fit(self, ids: list[int], loss_mask: list[bool], label: str) -> TokenizedText:
        excess = self.excess(len(ids), label)
        if not excess:
            return ids, loss_mask
        fitted, mask = cut(ids, excess, self.too_long), cut(loss_mask, excess, self.too_long)
        mask[0] = False  # the first token is not predicted from another token
        if not any(mask):
            raise BadRow(
                f"{label} has {len(ids)} tokens; cutting it to {self.max_tokens} leaves no token of the answer",
                "the cut leaves no token of the answer",
            )
        self.count_cut(label)
        return fitted, mask


def sequences(texts: Sequence[MaskedText], store: ImageStore | None = None) -> SequenceBatch:
    """Pad texts and their loss masks on the right to the longest text.

    Args:
        store: images of the data; None if the data have none.
    """
    ids, lengths = pad_right([text.ids for text in texts])
    loss_mask, _ = pad_right([text.loss_mask for text in texts])
    images = None if store is None else store.rows([text.images for text in texts])
    if not any(text.starts for text in texts):
        return SequenceBatch(ids, lengths, loss_mask.bool(), images)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        starts[row, list(text.starts)] = True
    shared = torch.tensor([text.shared for text in texts])
    return SequenceBatch(ids, lengths, loss_mask.bool(), images, text_starts=starts, shared=shared)
