"""Pairs of answers of which people prefer one."""

from __future__ import annotations

import torch

from lightning_rlhf.data.answers import AnswersDataModule, Marked, sequences
from lightning_rlhf.data.chat import common_prefix, holds_messages, messages_of
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.lengths import cut
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.types import PreferenceBatch

_Pair = tuple[Marked, Marked, float]


class PreferenceDataModule(AnswersDataModule):
    """Rows with ``chosen`` and ``rejected``, and ``prompt`` unless both hold the whole conversation.

    Each is text or messages. Of conversations in messages, what both begin with is the prompt; a prompt in messages
    that they repeat is not doubled. An optional number in ``margin`` says by how much the chosen answer is better.
    Where ``too_long`` cuts, ``cut_end`` cuts each text, and the others cut the prompt that both share.
    See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    gives = PreferenceBatch
    questions = ((("chosen", "chosen"),), (("rejected", "rejected"),), (("prompt", "prompt"),), (("margin", "margin"),))

    def convert(self, fields: Fields) -> _Pair:
        """Both texts with their answers marked, and the margin."""
        if holds_messages(fields["chosen"]) or holds_messages(fields["rejected"]):
            pair = self._of_messages(fields)
        else:
            pair = self._of_text(fields)
        chosen, rejected = self._fitting(*pair)
        if chosen.ids == rejected.ids:  # other texts may be, once they are cut or through the template
            raise BadRow("chosen and rejected are the same tokens: there is nothing to prefer")
        return chosen, rejected, fields.number("margin") if "margin" in fields else 0.0

    def _of_text(self, fields: Fields) -> tuple[Marked, Marked]:
        chosen, rejected = fields.text("chosen"), fields.text("rejected")
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same text")
        prompt = ""
        if "prompt" in fields:
            prompt, _ = self.prompt_of(fields)
        elif self.split_after is not None:
            (prompt, chosen), (other, rejected) = self.split(chosen), self.split(rejected)
            if prompt != other:
                raise BadRow("chosen and rejected answer different prompts")
        prompt_ids = self.ids(prompt)
        return self.marked_text(prompt_ids, chosen), self.marked_text(prompt_ids, rejected)

    def _of_messages(self, fields: Fields) -> tuple[Marked, Marked]:
        chosen, rejected = (messages_of(fields[name], f"{name} answer") for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same messages")
        shared = common_prefix(chosen, rejected)
        if "prompt" in fields and holds_messages(fields["prompt"]):
            prompt = messages_of(fields["prompt"], "prompt")
            if not (common_prefix(prompt, chosen) == common_prefix(prompt, rejected) == len(prompt)):
                chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
            shared = len(prompt)
        elif "prompt" in fields and fields.text("prompt") not in [m["content"] for m in chosen[:shared]]:
            raise BadRow("the prompt is text, and the messages of chosen and rejected do not begin with it")
        return (
            self.marked_messages(fields, chosen, "chosen conversation", shared),
            self.marked_messages(fields, rejected, "rejected conversation", shared),
        )

    def _fitting(self, chosen: Marked, rejected: Marked) -> tuple[Marked, Marked]:
        longest = max(len(chosen.ids), len(rejected.ids))
        excess = self.excess(longest, "a text")
        if not excess or self.too_long == "cut_end":
            return self.fit_marked(chosen, "a text"), self.fit_marked(rejected, "a text")
        prompt = min(chosen.start, rejected.start)
        if excess >= prompt:
            raise BadRow(
                f"a text has {longest} tokens, and cutting its prompt of {prompt} is not enough for {self.max_tokens}",
                "cutting the prompt is not enough",
            )
        self.count_cut("the prompt of a pair")
        short = [
            Marked([*cut(text.ids[:prompt], excess, self.too_long), *text.ids[prompt:]], text.said[excess:])
            for text in (chosen, rejected)
        ]
        return short[0], short[1]

    def tokens(self, example: _Pair) -> int:
        """Of both texts."""
        return len(example[0].ids) + len(example[1].ids)

    def longest(self, example: _Pair) -> int:
        """Of the longer text."""
        return max(len(example[0].ids), len(example[1].ids))

    def collate(self, examples: list[_Pair], numbers: list[int], places: list[int], epoch: int) -> PreferenceBatch:
        """Both texts right-padded, each side to its own width."""
        chosen, rejected, margins = zip(*examples, strict=True)
        return PreferenceBatch(sequences(chosen), sequences(rejected), torch.tensor(margins))
