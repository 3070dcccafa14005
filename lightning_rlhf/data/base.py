"""What the data modules share: rows in, tokenised examples kept in memory, resumable batches out."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.compat import replaces_samplers
from lightning_rlhf.data.chat import Message, chat_of, check_options, holds_messages, messages_of
from lightning_rlhf.data.columns import TEMPLATE, Columns, Fields, Question
from lightning_rlhf.data.lengths import TooLong, cut, refuse
from lightning_rlhf.data.resumable import HeldOutBatches, ResumableLoader, SamplerOrder
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, RowReport, Source, as_rows, use_rows
from lightning_rlhf.data.samplers import Sampler
from lightning_rlhf.data.text_messages import TextMessages
from lightning_rlhf.data.tokenizers import TokenizerSource, load_tokenizer, unknown_in
from lightning_rlhf.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.seeding import run_seed

log = logging.getLogger(__name__)


class RowsDataModule(LightningDataModule):
    """Reads rows, tokenises them once, and serves batches whose order and position a checkpoint restores.

    Args:
        train: JSON lines, JSON, CSV or parquet file, a directory or pattern of those, a URL, a hub id, a row source, or
            a list of any of these.
        val: likewise; None trains without validation.
        tokenizer: directory, hub id or tokenizer source.
        batch_size: rows per training batch, over all ranks.
        val_batch_size: rows per validation batch, over all ranks; None takes ``batch_size``.
        columns: which column holds what, where the names are not known or two could be meant: ``{prompt: question}``;
            dots lead into nested values: ``{ground_truth: extra_info.answer}``.
        split_after: where a column holds prompt and answer in one text, the prompt ends with the last occurrence of
            this marker.
        max_tokens: longest prompt with answer, in tokens.
        too_long: what becomes of a longer row: it is a bad row, it is left out and counted (``drop``), or tokens are
            cut from its start, end or middle.
        on_bad_row: ``error`` names the first bad rows and stops; ``skip`` leaves them out and counts.
        bad_rows: file for all rows that are not used, with where they stand and why, as JSON lines.
        shuffle: False keeps the order of the data.
        sampler: gives the order of each epoch instead.
        chat_template_kwargs: variables of the chat template, such as ``enable_thinking``; a row's own column of this
            name wins.
        as_messages: make messages of text, for a chat model: True makes a prompt a user's message and an answer an
            assistant's; where one text holds a conversation, the text that begins a message of each role:
            ``{user: "Human:", assistant: "Assistant:"}``. Columns that hold messages stay as they are.
    """

    questions: ClassVar[tuple[Question, ...]]
    gives: ClassVar[type]  # what collate makes

    def __init__(
        self,
        train: Source,
        tokenizer: str | TokenizerSource,
        val: Source | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        columns: dict[str, str] | None = None,
        split_after: str | None = None,
        max_tokens: int = 1024,
        too_long: TooLong = "bad_row",
        on_bad_row: OnBadRow = "error",
        bad_rows: str | None = None,
        shuffle: bool = True,
        sampler: Sampler | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        as_messages: bool | dict[str, str] = False,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.sources = {"train": train, **({} if val is None else {"val": val})}
        self.tokenizer_source = tokenizer
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.columns, self.split_after = Columns(columns or {}, (*self.questions, *TEMPLATE)), split_after
        self.max_tokens, self.too_long = max_tokens, too_long
        self.on_bad_row, self.bad_rows = on_bad_row, None if bad_rows is None else Path(bad_rows)
        self.shuffle, self.sampler = shuffle, sampler
        self.chat_template_kwargs: Mapping[str, Any] = chat_template_kwargs or {}
        check_options(self.chat_template_kwargs)
        if as_messages and split_after is not None:
            raise ValueError("split_after splits plain text, which as_messages makes messages of: give one of them")
        markers = as_messages if isinstance(as_messages, dict) else None
        self.text_messages = TextMessages(markers) if as_messages else None
        self.examples: dict[str, list[Any]] = {}
        self.reports: dict[str, RowReport] = {}
        self.tokenizer: PreTrainedTokenizerBase
        self._keys: list[Any] = []
        self._report = RowReport("data")
        self._cut: str | None = None  # what was cut of the present row
        self._unknown: list[str] = []  # what the tokenizer does not know of it

    @abstractmethod
    def convert(self, fields: Fields) -> Any:
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
        # Before the rows are read: other rows' columns would be reported as missing.
        if check_reads := getattr(self.trainer and self.trainer.lightning_module, "check_reads", None):
            check_reads(self)
        if isinstance(self.trainer, Trainer) and replaces_samplers(self.trainer):
            raise ValueError(
                f"{type(self).__name__} shares each batch between the processes itself, which the Trainer would "
                f"override: give Trainer(use_distributed_sampler=False)"
            )
        if self.examples:
            return
        sources = {name: as_rows(source) for name, source in self.sources.items()}  # a missing file is said first
        self.tokenizer = load_tokenizer(self.tokenizer_source)
        bad_rows = self._fresh_bad_rows()
        for name, source in sources.items():
            self._report = self.reports[name] = RowReport(f"{name} data")
            self.examples[name], _ = use_rows(
                source, f"{name} data", self._training_row if name == "train" else self._row, self.on_bad_row,
                self._report, bad_rows,
            )  # fmt: skip
            if self._report.unknown and self.trainer is not None and self.trainer.is_global_zero:
                log.warning("%s: %s", self._report.name, self._report.unknown_parts())

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text of all parts of the data."""
        every = (example for examples in self.examples.values() for example in examples)
        return max(map(self.longest, every), default=0)

    def longest(self, example: Any) -> int:
        """Tokens of the longest text of an example."""
        return self.tokens(example)

    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's share of shuffled whole batches."""
        rows = self.examples["train"]
        lengths = [self.tokens(example) for example in rows]
        order = None if self.sampler is None else SamplerOrder(self.sampler, self._keys, lengths, run_seed())
        rank, ranks = self._share()
        return ResumableLoader(
            rows, self.batch_size, self.collate, run_seed(), self.shuffle, lengths, rank, ranks, order
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
        ranks: DataRanks = getattr(strategy, "data_ranks", ONE_RANK)
        return ranks.rank, ranks.size

    def _fresh_bad_rows(self) -> Path | None:
        """The file for unused rows, emptied; only one process writes it."""
        if self.bad_rows is None or (self.trainer is not None and not self.trainer.is_global_zero):
            return None
        try:
            self.bad_rows.parent.mkdir(parents=True, exist_ok=True)
            self.bad_rows.write_text("")
        except OSError as error:
            raise ValueError(f"bad_rows {str(self.bad_rows)!r} cannot be written: {error.strerror}") from error
        return self.bad_rows

    def _row(self, row: Row) -> Any:
        fields = replace(self.columns.find(row), read=self.text_messages)
        self._cut, self._unknown = None, []
        example = self.convert(fields)
        self._report.understood[fields.described()] += 1
        if self._cut is not None:
            self._report.cut[self._cut] += 1
        if self._unknown:
            self._report.unknown.update(self._unknown)
            self._report.unknown_rows += 1
        return example

    def _training_row(self, row: Row) -> Any:
        key = None if self.sampler is None else self.sampler.key(self.columns.find(row))
        example = self._row(row)
        self._keys.append(key)
        return example

    # -- helpers for convert ----------------------------------------------------------------------------------

    def prompt_of(self, fields: Fields) -> tuple[str, list[Message]]:
        """The prompt as text, and the messages it was made of by the chat template, if it was.

        Raises:
            BadRow: no prompt, messages without a template, or messages that the template refuses.
        """
        value = fields["prompt"]
        if not holds_messages(value):
            return fields.text("prompt"), []
        messages = messages_of(value, "prompt")
        return chat_of(self.tokenizer, fields, self.chat_template_kwargs).render(messages, "prompt", True), messages

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
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            self.note_unknown(text)
        return ids

    def note_unknown(self, text: str) -> None:
        """Report what the tokenizer does not know of a text of the present row."""
        self._unknown += unknown_in(self.tokenizer, text)

    def excess(self, tokens: int, what: str) -> int:
        """How many tokens are to be cut, 0 if none.

        Raises:
            BadRow: there are too many, and they are not to be cut.
        """
        if tokens > self.max_tokens and self.too_long in ("bad_row", "drop"):
            refuse(tokens, self.max_tokens, what, self.too_long)
        return max(tokens - self.max_tokens, 0)

    def fit(self, ids: list[int], what: str) -> list[int]:
        """The ids, cut to ``max_tokens`` if that is what is to be done with longer ones.

        Raises:
            BadRow: longer, and not to be cut.
        """
        if excess := self.excess(len(ids), what):
            self.count_cut(what)
            return cut(ids, excess, self.too_long)
        return ids

    def count_cut(self, what: str) -> None:
        """Report that the present row was cut, once, and if it is used."""
        self._cut = f"{what} to {self.max_tokens} tokens ({self.too_long})"
