"""What the three data modules share: rows in, tokenised examples kept in memory, resumable batches out."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jinja2 import TemplateError
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.resumable import HeldOutBatches, ResumableLoader
from lightning_rlhf.data.rows import BadRow, OnBadRow, Row, RowReport, RowSource, as_rows, is_unicode, text_of, use_rows
from lightning_rlhf.data.tokenizers import TokenizerSource, load_tokenizer
from lightning_rlhf.seeding import run_seed


class RowsDataModule(LightningDataModule):
    """Reads rows, tokenises them once, and serves batches whose order and position a checkpoint restores.

    Args:
        train: JSONL file, other file, hub id or row source.
        val: likewise; None trains without validation.
        tokenizer: directory, hub id or tokenizer source.
        batch_size: rows per training batch, over all ranks.
        val_batch_size: rows per validation batch, over all ranks; None takes ``batch_size``.
        columns: which column holds what, where the names differ from ours: ``{prompt: question}``.
        split_after: where a column holds prompt and answer in one text, the prompt ends with the last occurrence of
            this marker.
        max_tokens: longest prompt with answer, in tokens; a longer row is a bad row.
        on_bad_row: ``error`` names the first bad rows and stops; ``skip`` leaves them out and counts.
        shuffle: False keeps the order of the data.
    """

    def __init__(
        self,
        train: str | RowSource,
        tokenizer: str | TokenizerSource,
        val: str | RowSource | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        columns: dict[str, str] | None = None,
        split_after: str | None = None,
        max_tokens: int = 1024,
        on_bad_row: OnBadRow = "error",
        shuffle: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.sources = {"train": train, **({} if val is None else {"val": val})}
        self.tokenizer_source = tokenizer
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.columns, self.split_after = dict(columns or {}), split_after
        self.max_tokens, self.on_bad_row, self.shuffle = max_tokens, on_bad_row, shuffle
        self.examples: dict[str, list[Any]] = {}
        self.reports: dict[str, RowReport] = {}
        self.tokenizer: PreTrainedTokenizerBase

    @abstractmethod
    def convert(self, row: Row) -> Any:
        """One tokenised example of a row, or :class:`BadRow`."""

    @abstractmethod
    def tokens(self, example: Any) -> int:
        """Tokens of an example, by which a batch is shared among ranks."""

    @abstractmethod
    def collate(self, examples: list[Any], numbers: list[int], places: list[int], epoch: int) -> Any:
        """One batch, or a rank's share of one: examples, their row numbers and their places in the whole batch."""

    def setup(self, stage: str) -> None:
        """Read and tokenise everything once."""
        if self.trainer is not None and "val" not in self.sources:
            self.trainer.limit_val_batches = 0  # an empty loader would do, with a warning at every run
        if self.examples:
            return
        sources = {name: as_rows(source) for name, source in self.sources.items()}  # a missing file is said first
        self.tokenizer = load_tokenizer(self.tokenizer_source)
        for name, source in sources.items():
            self.examples[name], self.reports[name] = use_rows(source, f"{name} data", self.convert, self.on_bad_row)

    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's share of shuffled whole batches."""
        rows = self.examples["train"]
        lengths = [self.tokens(example) for example in rows]
        rank, ranks = self._share()
        return ResumableLoader(
            rows, self.batch_size, self.collate, run_seed(), self.shuffle, lengths=lengths, rank=rank, ranks=ranks
        )

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """This rank's share of all rows in their order; none without validation data."""
        if "val" not in self.examples:
            return []
        rows = self.examples["val"]
        return DataLoader(
            range(len(rows)),  # type: ignore[arg-type]  # a sequence is all it needs
            batch_sampler=HeldOutBatches(len(rows), self.val_batch_size, *self._share()),
            collate_fn=lambda numbers: self.collate([rows[i] for i in numbers], numbers, numbers, 0),
            generator=torch.Generator(),  # so that a validation leaves the global one as it was
        )

    def _share(self) -> tuple[int, int]:
        """This process's share of each batch, and the number of shares."""
        strategy = None if self.trainer is None else self.trainer.strategy
        return getattr(strategy, "data_rank", 0), getattr(strategy, "data_ranks", 1)

    # -- helpers for convert ----------------------------------------------------------------------------------

    def column(self, row: Row, name: str) -> str:
        """The text of the column that holds ``name``."""
        return text_of(row, self.columns.get(name, name))

    def prompt_of(self, row: Row) -> str:
        """The prompt as text; a list of messages goes through the chat template.

        Raises:
            BadRow: no prompt, messages without a template, or messages that the template refuses.
        """
        value = row.get(self.columns.get("prompt", "prompt"))
        if not isinstance(value, list):
            return self.column(row, "prompt")
        if self.tokenizer.chat_template is None:
            raise BadRow("the prompt is a list of messages, and the tokenizer has no chat template")
        if not value or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value
        ):
            raise BadRow("every message of a prompt needs 'role' and text in 'content'")
        try:
            text = str(self.tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise BadRow(f"the chat template refuses the prompt: {error}") from error
        if not is_unicode(text):
            raise BadRow("the prompt is not valid UTF-8 text")
        return text

    def split(self, text: str) -> tuple[str, str]:
        """Prompt and answer of a text that holds both.

        Raises:
            BadRow: the marker does not occur, or nothing follows it.
        """
        head, marker, tail = text.rpartition(self.split_after or "\0")
        if not marker:
            raise BadRow(f"the marker {self.split_after!r} does not occur in the text")
        if not tail.strip():
            raise BadRow(f"nothing follows the last {self.split_after!r}")
        return head + marker, tail

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def fit(self, ids: list[int], what: str) -> list[int]:
        """The ids themselves.

        Raises:
            BadRow: longer than ``max_tokens``.
        """
        if len(ids) > self.max_tokens:
            raise BadRow(
                f"{what} has {len(ids)} tokens, the limit is {self.max_tokens}",
                f"{what} longer than {self.max_tokens} tokens",
            )
        return ids
