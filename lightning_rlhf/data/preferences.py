"""Pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_rlhf.data.answers import AnswersDataModule, MaskedText, sequences
from lightning_rlhf.data.columns import Fields, check_no_other_prompt
from lightning_rlhf.data.image_parts import MARKER, text_of_content
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.messages import Message, common_prefix, holds_messages, messages_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.types import PreferenceBatch

_Pair = tuple[MaskedText, MaskedText, float]


class PreferenceDataModule(AnswersDataModule):
    """Reads rows with ``chosen`` and ``rejected``, and ``prompt`` unless both hold the whole conversation.

    Use it for DPO and reward models. Each column is text or messages. The messages at the start that both conversations
    share are the prompt. If you give a ``prompt`` of messages and both conversations already begin with it, it is not
    added again. Without a column ``prompt`` you get an error if another one, such as ``question``, looks like the
    prompt. An optional number in ``margin`` is the difference in quality between the answers. A pair whose two answers
    have the same tokens is a bad row. ``too_long: cut_end`` cuts the end of each text. The other cuts shorten the
    shared prompt. For the arguments, see :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    batch_type = PreferenceBatch
    field_candidates = (
        (("chosen", "chosen"),),
        (("rejected", "rejected"),),
        (("prompt", "prompt"), ("prompt", "conversations")),  # the latter in LLaMA-Factory's pairs
        (("margin", "margin"),),
    )

    def convert(self, fields: Fields) -> _Pair:
        """Tokenize both texts with their loss masks, and read the margin."""
        if holds_messages(fields["chosen"]) or holds_messages(fields["rejected"]):
            pair = self._pair_from_messages(fields)
        else:
            pair = self._pair_from_text(fields)
        chosen, rejected = self._fit_pair(*pair)
        if chosen.ids == rejected.ids:  # different texts can become equal by the cut or the template
            raise BadRow("chosen and rejected have the same tokens")
        return chosen, rejected, 0.0 if fields.get("margin") is None else fields.number("margin")

    def _pair_from_text(self, fields: Fields) -> tuple[MaskedText, MaskedText]:
        chosen, rejected = fields.text("chosen"), fields.text("rejected")
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same text")
        prompt = ""
        if "prompt" in fields:
            rendered = self.prompt_of(fields)
            return self.mask_answer(fields, rendered, chosen), self.mask_answer(fields, rendered, rejected)
        self.check_plain_text(fields)
        if self.split_after is not None:
            (prompt, chosen), (other, rejected) = self.split(chosen), self.split(rejected)
            if prompt != other:
                raise BadRow("chosen and rejected answer different prompts")
        else:
            check_no_other_prompt(fields, [chosen, rejected])
        prompt_ids = self.tokenize(prompt)
        return self.mask_text(prompt_ids, chosen), self.mask_text(prompt_ids, rejected)

    def _pair_from_messages(self, fields: Fields) -> tuple[MaskedText, MaskedText]:
        has_prompt = "prompt" in fields and holds_messages(fields["prompt"])
        chosen, rejected = (
            self.messages(fields, name, f"{name} answer", is_answer=has_prompt) for name in ("chosen", "rejected")
        )
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same messages")
        shared = common_prefix(chosen, rejected)
        if has_prompt:
            prompt = self.messages(fields, "prompt", "prompt")
            answers = [_stripped(messages) for messages in (chosen, rejected)]
            for start in (prompt, messages_of(fields["prompt"], "prompt", self.roles)):  # the latter as it is written
                if all(common_prefix(_stripped(start), answer) == len(start) for answer in answers):
                    chosen, rejected = chosen[len(start) :], rejected[len(start) :]
                    break
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
            shared = len(prompt)
        elif "prompt" in fields:
            text = fields.text("prompt").strip()
            texts = [text_of_content(message["content"]) for message in chosen[:shared]]
            if not any(text in (content.strip(), content.replace(MARKER, "").strip()) for content in texts):
                raise BadRow("the prompt is text, but the messages of chosen and rejected do not begin with it")
        elif not any(message["role"] == "user" for message in chosen[:shared]):
            check_no_other_prompt(fields, [])
            raise BadRow(
                "chosen and rejected have no question in common, and the row has no prompt", "no question and no prompt"
            )
        return (
            self.mask_messages(fields, chosen, "chosen conversation", shared),
            self.mask_messages(fields, rejected, "rejected conversation", shared),
        )

    def _fit_pair(self, chosen: MaskedText, rejected: MaskedText) -> tuple[MaskedText, MaskedText]:
        longest = max(chosen.longest, rejected.longest)
        excess = self.excess(longest, "a text", has_images=bool(chosen.images))
        if not excess or self.too_long == "cut_end" or chosen.starts or rejected.starts:
            return self.fit_text(chosen, "a text"), self.fit_text(rejected, "a text")
        prompt = min(chosen.first_answer_token, rejected.first_answer_token)
        if excess >= prompt:
            raise BadRow(
                f"a text has {longest} tokens; cutting its prompt of {prompt} is not enough for {self.max_tokens}",
                "cutting the prompt is not enough",
            )
        self.count_cut("the prompt of a pair")
        short = [
            MaskedText([*cut(text.ids[:prompt], excess, self.too_long), *text.ids[prompt:]], text.loss_mask[excess:])
            for text in (chosen, rejected)
        ]
        return short[0], short[1]

    def count_tokens(self, example: _Pair) -> int:
        """Count the tokens of both texts."""
        return len(example[0].ids) + len(example[1].ids)

    def count_longest_text(self, example: _Pair) -> int:
        """Count the tokens of the longer text."""
        return max(example[0].longest, example[1].longest)

    def collate(self, examples: list[_Pair], numbers: list[int], positions: list[int], epoch: int) -> PreferenceBatch:
        """Pad chosen and rejected texts on the right, each side to its own longest text."""
        chosen, rejected, margins = zip(*examples, strict=True)
        return PreferenceBatch(
            sequences(chosen, self.image_store), sequences(rejected, self.image_store), torch.tensor(margins)
        )


def _stripped(messages: Sequence[Message]) -> list[Message]:
    """Return messages without white space around their texts."""
    return [
        {**message, "content": message["content"].strip()} if isinstance(message["content"], str) else message
        for message in messages
    ]
