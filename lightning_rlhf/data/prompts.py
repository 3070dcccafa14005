"""Prompts for rollouts."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.rows import Row
from lightning_rlhf.types import PromptBatch


class PromptDataModule(RowsDataModule):
    """Rows with a ``prompt`` (text or messages); all further columns reach the reward functions.

    With ``split_after`` and no prompt column, the prompt is the front part of the ``chosen`` text, so preference data
    serves as prompts. ``max_tokens`` limits the prompt. See :class:`~lightning_rlhf.data.base.RowsDataModule`.
    """

    def convert(self, row: Row) -> tuple[str, list[int], dict[str, Any]]:
        """Text, token ids and further columns."""
        prompt_column = self.columns.get("prompt", "prompt")
        if self.split_after is not None and prompt_column not in row:
            text, _ = self.split(self.column(row, "chosen"))
        else:
            text = self.prompt_of(row)
        rest = {self._our_name(key): value for key, value in row.items() if key != prompt_column}
        return text, self.fit(self.ids(text), "the prompt"), rest

    def tokens(self, example: tuple[str, list[int], dict[str, Any]]) -> int:
        """Of the prompt."""
        return len(example[1])

    def collate(self, examples: list[Any], numbers: list[int], places: list[int], epoch: int) -> PromptBatch:
        """Token ids stay lists: the engine pads as it likes."""
        texts, ids, rests = zip(*examples, strict=True)
        columns = {key: [rest.get(key) for rest in rests] for key in sorted({key for rest in rests for key in rest})}
        return PromptBatch(list(numbers), list(ids), list(texts), columns, epoch, list(places))

    def _our_name(self, column: str) -> str:
        return next((ours for ours, theirs in self.columns.items() if theirs == column), column)
