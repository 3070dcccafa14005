"""Pairs of answers of which people prefer one."""

from __future__ import annotations

import math

import torch

from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.conversations import answers_marked
from lightning_rlhf.data.rows import BadRow, Row
from lightning_rlhf.types import PreferenceBatch

_Pair = tuple[list[int], list[int], int, float]


class PreferenceDataModule(RowsDataModule):
    """Rows with ``chosen`` and ``rejected``, and ``prompt`` unless both hold the whole conversation.

    An optional number in ``margin`` says by how much the chosen answer is better.
    See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    def convert(self, row: Row) -> _Pair:
        """Token ids of both texts, the number of prompt tokens, the margin."""
        chosen, rejected = self.column(row, "chosen"), self.column(row, "rejected")
        if chosen == rejected:
            raise BadRow("chosen and rejected are the same text")
        prompt = ""
        if self.columns.get("prompt", "prompt") in row:
            prompt = self.prompt_of(row)
        elif self.split_after is not None:
            (prompt, chosen), (other, rejected) = self.split(chosen), self.split(rejected)
            if prompt != other:
                raise BadRow("chosen and rejected answer different prompts")
        prompt_ids, end = self.ids(prompt), [self.tokenizer.eos_token_id]
        texts = [self.fit([*prompt_ids, *self.ids(text), *end], "a text") for text in (chosen, rejected)]
        return texts[0], texts[1], max(len(prompt_ids), 1), _margin(row.get(self.columns.get("margin", "margin"), 0.0))

    def tokens(self, example: _Pair) -> int:
        """Of both texts."""
        return len(example[0]) + len(example[1])

    def collate(self, examples: list[_Pair], numbers: list[int], places: list[int], epoch: int) -> PreferenceBatch:
        """Both texts right-padded, each side to its own width."""
        chosen, rejected, starts, margins = zip(*examples, strict=True)
        return PreferenceBatch(answers_marked(chosen, starts), answers_marked(rejected, starts), torch.tensor(margins))


def _margin(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"margin holds {'null' if value is None else type(value).__name__}, expected a number")
    if not math.isfinite(value):
        raise BadRow(f"margin is {value}, expected a finite number")
    return float(value)
