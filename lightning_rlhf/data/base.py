"""Base class of the data modules: reads rows, keeps tokenized examples in memory, serves resumable batches."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.compat import replaces_samplers
from lightning_rlhf.data.chat import Chat, chat_of, check_options, tool_schemas
from lightning_rlhf.data.columns import TEMPLATE_FIELDS, Columns, FieldCandidates, Fields, unread_message
from lightning_rlhf.data.completeness import check_complete
from lightning_rlhf.data.image_parts import MARKER, as_bad_row, given_images, images_of, with_images
from lightning_rlhf.data.lengths import TooLong, cut, raise_too_long
from lightning_rlhf.data.messages import Message, check_roles, history_messages, holds_messages, messages_of
from lightning_rlhf.data.resumable import EpochOrder, HeldOutBatches, ObservingSampler, ResumableLoader, SamplerOrder
from lightning_rlhf.data.row import BadRow, Row, RowSource, has_nulls
from lightning_rlhf.data.rows import OnBadRow, RowReport, Source, as_rows, folder_of, use_rows
from lightning_rlhf.data.samplers import Sampler
from lightning_rlhf.data.text_messages import TextMessages
from lightning_rlhf.data.tokenizers import TokenizerSource, end_tokens_of, load_tokenizer, unknown_parts
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.seeding import run_seed
from lightning_rlhf.images import ImageSettings, ImageStore, reader

log = logging.getLogger(__name__)


class PromptText(NamedTuple):
    """A prompt as text.

    Args:
        text: text of the prompt, in which each image is expanded to what stands for it.
        unexpanded: text with one placeholder for each image; equal to ``text`` without images.
        messages: chat messages of the prompt; empty for plain text.
        images: images of the prompt in their order.
        tools: JSON schemas of the tools that the chat template described.
    """

    text: str
    unexpanded: str
    messages: Sequence[Message] = ()
    images: Sequence[EncodedImage] = ()
    tools: Sequence[dict[str, Any]] = ()


@dataclass
class _RowNotes:
    """Counts of the row that is converted, which are reported if the row is used.

    Args:
        cut: description of the row's cut; None if it was not cut.
        unknown: parts of the row that the tokenizer does not know, with their numbers.
        images: whether an image of the row was read.
        others: sentences without the row's values, such as about thoughts that the chat template leaves out.
    """

    cut: str | None = None
    unknown: Counter[str] = field(default_factory=Counter)
    images: bool = False
    others: set[str] = field(default_factory=set)


_IMAGES_ADVICE = (
    "to use longer rows with images, which are never cut, raise max_tokens, or let the processor make images smaller"
)


class _FirstImage(Exception):
    """The first image of the data is in a row after others, which were not searched for the processor's placeholder."""


class RowsDataModule(LightningDataModule):
    """Reads your rows, tokenizes them once, and serves batches in an order and position that a checkpoint restores.

    Thoughts in messages are read from ``reasoning_content``, ``reasoning``, ``reasoning_details``, ``thinking``,
    ``thought``, ``thoughts`` or parts of the content, and renamed to the key that your template reads. A tool call in a
    message of its own is merged into the assistant's message before it. In a CSV file, messages need the notation of
    ``json.dumps``. You get an error for Python's, with single quotes, which pandas writes.

    To find texts that a chat template leaves out, each conversation is rendered a second time with a marker word in
    place of each text. If a marker is missing from the result, the row is a bad row. You also get an error if nothing
    reads a column such as ``system``, ``history``, ``videos`` or ``audios``. A reward function or an environment may
    read it.

    Args:
        train: training data. You can give a JSON lines, JSON, CSV or parquet file, a directory or pattern of those, a
            URL, a hub id, a row source, or a list of any of these. What looks like a path (it begins with ``.``, ``/``,
            ``~`` or an existing directory, or contains two slashes) is never requested from the hub. Of a directory,
            hidden files and descriptions such as ``dataset_info.json`` are left out, and files of several splits are an
            error. CSV values are text, which becomes numbers in numeric fields (``margin``, ``label``, a sampler's
            column). A null within a value of Parquet, Arrow or the hub is left out, so that a tool call gets its own
            arguments and not all others' too. In JSON lines it stays.
        val: validation data, as for ``train``. None trains without validation.
        tokenizer: directory, hub id or tokenizer source.
        batch_size: rows per training batch, over all ranks.
        val_batch_size: rows per validation batch, over all ranks. None uses ``batch_size``.
        columns: column of each field, for unknown or ambiguous column names, such as ``{prompt: question}``. Dots
            separate the keys of nested values: ``{ground_truth: extra_info.answer}``. Tools beside nested messages are
            read too: ``{prompt: input.messages}`` finds ``input.tools``. Null leaves a column out: ``{system: null}``.
        split_after: marker that ends the prompt in columns that contain prompt and answer in one text. Its last
            occurrence counts.
        max_tokens: most tokens of a prompt with its answer.
        too_long: what happens to longer rows. ``bad_row`` counts them as bad rows, and ``drop`` skips and counts them.
            ``cut_start``, ``cut_end`` and ``cut_middle`` remove tokens and count the rows as cut. A cut that leaves no
            token of an answer makes a bad row.
        on_bad_row: ``error`` stops and reports the first bad rows, ``skip`` skips and counts them. A broken line of
            JSON lines or an unclosed CSV quote is one bad row. A broken JSON array ends the run.
        bad_rows: file for all unused rows, with location and reason, as JSON lines.
        shuffle: False keeps the order of the data.
        sampler: sets the order of each epoch, and overrides ``shuffle``.
        chat_template_kwargs: variables of the chat template, such as ``enable_thinking``. A row's column of this name
            takes priority.
        as_messages: how text becomes messages, for a chat model. True makes a prompt a user message and an answer an
            assistant message. If your texts contain a whole conversation, give the marker at the start of each role's
            messages: ``{user: "Human:", assistant: "Assistant:"}``. Columns with messages are not changed.
        tools: functions that the chat template describes as tools in rows without a column ``tools``, as references
            ``file.py:name`` or ``module:name``.
        roles: further names of roles in messages, with the role of each: system, developer, user, assistant or tool.
            Names of common formats are known, such as ``human`` and ``observation``.
        images: folder and limits of the rows' images. None takes the directory of the data file. Rows contain images in
            the parts of messages (``{type: image, image: ...}``), or in a column ``images``. The places of the latter
            are parts without an image or ``<image>`` in texts. You then need the tokenizer of a vision-language model.
    """

    field_candidates: ClassVar[tuple[FieldCandidates, ...]]
    batch_type: ClassVar[type]  # type of the batches that collate returns
    _image_folder: Path | None = None  # directory of the row's file
    _unchecked = False  # whether texts were read before the processor, whose placeholder they may contain

    def __init__(
        self,
        train: Source,
        tokenizer: str | TokenizerSource,
        val: Source | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        columns: dict[str, str | None] | None = None,
        split_after: str | None = None,
        max_tokens: int = 1024,
        too_long: TooLong = "bad_row",
        on_bad_row: OnBadRow = "error",
        bad_rows: str | None = None,
        shuffle: bool = True,
        sampler: Sampler | ObservingSampler | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        as_messages: bool | dict[str, str] = False,
        tools: list[str] | None = None,
        roles: dict[str, str] | None = None,
        images: ImageSettings | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "val_batch_size": val_batch_size, "max_tokens": max_tokens}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        self.sources = {"train": train, **({} if val is None else {"val": val})}
        self.tokenizer_source = tokenizer
        self.batch_size = batch_size
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.columns = Columns(columns or {}, (*self.field_candidates, *TEMPLATE_FIELDS))
        self.split_after = split_after
        self.max_tokens, self.too_long = max_tokens, too_long
        self.on_bad_row, self.bad_rows = on_bad_row, None if bad_rows is None else Path(bad_rows)
        self.shuffle, self.sampler = shuffle, sampler
        self.chat_template_kwargs: Mapping[str, Any] = chat_template_kwargs or {}
        check_options(self.chat_template_kwargs)
        self.tools, self.roles = tool_schemas(tools or []), check_roles(roles)
        if as_messages and split_after is not None:
            raise UsageError("split_after splits plain text, but as_messages makes it messages: set only one of them")
        markers = as_messages if isinstance(as_messages, dict) else None
        self.text_messages = TextMessages(markers) if as_messages else None
        self.image_settings = images or ImageSettings()
        self.image_store: ImageStore | None = None  # of the rows with images
        self.examples: dict[str, list[Any]] = {}
        self.reports: dict[str, RowReport] = {}
        self.tokenizer: PreTrainedTokenizerBase
        self._sampler_keys: list[Any] = []  # of the training rows
        self._notes = _RowNotes()

    @abstractmethod
    def convert(self, fields: Fields) -> Any:
        """Tokenize a row, or raise :class:`BadRow`."""

    @abstractmethod
    def count_tokens(self, example: Any) -> int:
        """Count the tokens of an example. Batches are balanced over ranks by this number."""

    @abstractmethod
    def collate(self, examples: list[Any], numbers: list[int], positions: list[int], epoch: int) -> Any:
        """Build a batch, or a rank's part of one.

        Args:
            examples: tokenized examples.
            numbers: row number of each example.
            positions: position of each example in the batch over all ranks.
            epoch: number of completed epochs.
        """

    def setup(self, stage: str) -> None:
        """Read and tokenize all rows once."""
        if self.trainer is not None and "val" not in self.sources:
            self.trainer.limit_val_batches = 0  # an empty loader would also work, but with a warning in every run
        # Before the rows are read, because data for another module would fail with missing columns.
        module = None if self.trainer is None else self.trainer.lightning_module
        if check_reads := getattr(module, "check_reads", None):
            check_reads(self)
        if isinstance(self.trainer, Trainer) and replaces_samplers(self.trainer):
            raise UsageError(
                f"{type(self).__name__} splits each batch over the ranks, and the Trainer would replace its sampler: "
                f"set Trainer(use_distributed_sampler=False)"
            )
        if self.trainer is not None and isinstance(self.sampler, ObservingSampler):
            self.sampler.attach(self.trainer)
        if self.examples:
            return
        sources = {name: as_rows(source) for name, source in self.sources.items()}  # raises early for a missing file
        self.tokenizer = load_tokenizer(self.tokenizer_source)
        self.image_store, self._unchecked = None, False
        try:
            examples = self._read(sources)
        except _FirstImage:
            self._unchecked = False
            examples = self._read(sources)
        self._unchecked = False
        self.examples = examples  # of all parts: after an error, another call reads all again

    def _read(self, sources: Mapping[str, RowSource]) -> dict[str, list[Any]]:
        """Read and tokenize all rows of some sources."""
        bad_rows = self._create_bad_rows_file()
        examples: dict[str, list[Any]] = {}
        self._sampler_keys = []
        for name, source in sources.items():
            report = self.reports[name] = RowReport(f"{name} data")
            convert = self._convert_training_row if name == "train" else self._convert_row
            examples[name], _ = use_rows(
                source, report.name, partial(convert, report), self.on_bad_row, report=report, bad_rows=bad_rows
            )
            if self.trainer is not None and self.trainer.is_global_zero:
                for line in filter(None, [report.describe_unknown(), *report.describe_notes()]):
                    log.warning("%s: %s", report.name, line)
        if self.trainer is not None and self.trainer.is_global_zero and self.date_warning:
            log.warning("%s", self.date_warning)
        return examples

    @property
    def longest_text_tokens(self) -> int:
        """Number of tokens of the longest text in training and validation data."""
        all_examples = (example for examples in self.examples.values() for example in examples)
        return max(map(self.count_longest_text, all_examples), default=0)

    def count_longest_text(self, example: Any) -> int:
        """Count the tokens of the longest text of an example."""
        return self.count_tokens(example)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's part of each training batch."""
        rows = self.examples["train"]
        lengths = [self.count_tokens(example) for example in rows]
        order: EpochOrder | None = None
        if isinstance(self.sampler, ObservingSampler):
            order = self.sampler.row_order(self._sampler_keys, lengths, run_seed(), self.batch_size)
        elif self.sampler is not None:
            order = SamplerOrder(self.sampler, self._sampler_keys, lengths, run_seed())
        rank, ranks = self._data_rank()
        return ResumableLoader(
            rows,
            self.batch_size,
            self.collate,
            seed=run_seed(),
            shuffle=self.shuffle,
            lengths=lengths,
            rank=rank,
            ranks=ranks,
            order=order,
        )

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return a loader of this rank's part of each validation batch, or an empty list without validation data."""
        if "val" not in self.examples:
            return []
        rows = self.examples["val"]
        return DataLoader(
            range(len(rows)),  # type: ignore[arg-type]  # any sequence works
            batch_sampler=HeldOutBatches(len(rows), self.val_batch_size, *self._data_rank()),
            collate_fn=lambda numbers: self.collate([rows[i] for i in numbers], numbers, numbers, 0),
            generator=torch.Generator(),  # so that validation does not advance the global generator
        )

    def _data_rank(self) -> tuple[int, int]:
        """Return this process's data rank and the number of data ranks."""
        strategy = None if self.trainer is None else self.trainer.strategy
        ranks: DataRanks = getattr(strategy, "data_ranks", ONE_RANK)
        return ranks.rank, ranks.size

    def _create_bad_rows_file(self) -> Path | None:
        """Create an empty file for unused rows and return its path; None on ranks that do not write it."""
        if self.bad_rows is None or (self.trainer is not None and not self.trainer.is_global_zero):
            return None
        try:
            self.bad_rows.parent.mkdir(parents=True, exist_ok=True)
            self.bad_rows.write_text("")
        except OSError as error:
            raise UsageError(f"bad_rows {str(self.bad_rows)!r} cannot be written: {error.strerror}") from error
        return self.bad_rows

    def _convert_row(self, report: RowReport, row: Row) -> Any:
        """Tokenize a row, and count its columns, its cut and its unknown parts in the report."""
        fields = replace(self.columns.find(row), transform=self.text_messages, roles=self.roles)
        self._image_folder = folder_of(report.location)
        self._notes = _RowNotes()
        example = self.convert(fields)
        if given_images(fields) and not self._notes.images:
            raise BadRow("the column images has no place in this row: use messages, or a prompt and its answer")
        report.unread.update(self.check_unread(fields))
        self._unchecked |= self.image_store is None
        report.column_mappings[fields.describe()] += 1
        report.has_messages |= fields.has_messages()
        if self._notes.cut is not None:
            report.cut[self._notes.cut] += 1
        report.notes.update(sorted(self._notes.others))
        if self._notes.unknown:
            report.unknown.update(self._notes.unknown)
            report.unknown_rows += 1
        return example

    def _convert_training_row(self, report: RowReport, row: Row) -> Any:
        """Tokenize a row, and keep its key for the sampler."""
        key = None if self.sampler is None else self.sampler.key(self.columns.find(row))
        example = self._convert_row(report, row)
        self._sampler_keys.append(key)
        return example

    # -- helpers for convert ----------------------------------------------------------------------------------

    def check_unread(self, fields: Fields) -> list[str]:
        """Return the columns of a row that nothing reads.

        Raises:
            BadRow: one of them is part of the text in other libraries.
        """
        for name in fields.lost:
            if name not in self.columns.left_out:
                raise BadRow(unread_message(name), f"nothing reads the column {name!r}")
        return fields.unread

    def messages(self, fields: Fields, name: str, label: str, is_answer: bool = False) -> list[Message]:
        """Return the messages of a field, with their images.

        Args:
            fields: fields of the row.
            name: name of the field.
            label: what error messages call these messages.
            is_answer: whether the messages are an answer. Their images then belong to the prompt.

        Raises:
            BadRow: the value is not a list of messages, or an image cannot be used.
        """
        messages = messages_of(fields[name], label, self.roles)
        if any(has_nulls(message.get("tool_calls")) for message in messages):
            self.note("tool calls have null values, which are rendered as null")
        if not is_answer:
            messages = [*self._opening(fields, messages), *messages]
        return with_images(messages, given_images(fields), self._read_image, is_answer)

    @staticmethod
    def _opening(fields: Fields, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that the columns ``system`` and ``history`` put before those of the prompt.

        Raises:
            BadRow: a column is not what it should be, or the messages have another system message already.
        """
        system, history = fields.get("system"), history_messages(fields)
        if system in (None, [], {}):
            return history
        column = fields.names["system"]
        if not isinstance(system, str):
            raise BadRow(
                f"column {column!r} holds {type(system).__name__}, expected the text of the system message; "
                f"{fields.leave_out('system')}",
                f"column {column!r} is not text",
            )
        if not system.strip():
            return history
        if messages[0]["role"] in ("system", "developer"):
            if messages[0]["content"] == system:
                return history
            raise BadRow(
                f"the messages begin with a system message, and the column {column!r} has another one; "
                f"{fields.leave_out('system')}",
                f"two system messages, one in the column {column!r}",
            )
        return [{"role": "system", "content": system}, *history]

    def prompt_of(self, fields: Fields) -> PromptText:
        """Return the prompt as text, with its images, and its messages if the chat template rendered it.

        Raises:
            BadRow: the prompt is missing, the tokenizer has no chat template, or the template rejects the messages.
        """
        if holds_messages(fields["prompt"]):
            return self.prompt_of_messages(fields, self.messages(fields, "prompt", "prompt"))
        text = fields.text("prompt")
        self.check_plain_text(fields)
        with as_bad_row():
            images = [self._read_image(value) for value in given_images(fields)]
            if not images:
                return PromptText(self.without_images(text), text)
            text = text.replace(MARKER, self._store.processor.placeholder)
            return PromptText(self._store.processor.expand(text, images), text, images=images)

    @staticmethod
    def check_plain_text(fields: Fields) -> None:
        """Check that a row with a plain-text prompt has no columns that only a chat template can write.

        Raises:
            BadRow: it has one.
        """
        for name in ("system", "history", "tools"):
            value = fields.get(name)
            if value and not (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")):
                column = fields.names[name]
                raise BadRow(
                    f"the chat template would write the column {column!r} before the prompt, which is plain text: set "
                    f"as_messages: true, or leave the column out by data.init_args.columns: {{{column}: null}}",
                    f"the column {column!r} has no place before a prompt that is plain text",
                )

    def without_images(self, text: str) -> str:
        """Return a text, after checking that it contains no image.

        Raises:
            BadRow: the text contains the placeholder of an image.
        """
        with as_bad_row():
            return self._expand(text, ())

    def prompt_of_messages(self, fields: Fields, messages: list[Message]) -> PromptText:
        """Return the prompt that the chat template renders from messages."""
        chat, images = self.chat(fields), images_of(messages)
        text = chat.render_prompt(messages)
        self.note(*check_complete(chat, messages, "prompt", generation=True))
        unexpanded = chat.render_prompt(messages, expanded=False) if images else text
        return PromptText(text, unexpanded, messages, images, chat.tools or ())

    def note(self, *sentences: str) -> None:
        """Record sentences about the current row. They are counted over all rows."""
        self._notes.others.update(sentences)

    def _read_image(self, value: Any) -> EncodedImage:
        _ = self._store  # a model that reads no images is a better error than an image that cannot be used
        self._notes.images = True
        image: EncodedImage = reader().read_image(value, self.image_settings, self._image_folder)
        return image

    @property
    def _store(self) -> ImageStore:
        """The images of the data; the processor is loaded with the first row that has one."""
        if self.image_store is None:
            if not isinstance(self.tokenizer_source, str):
                raise UsageError(
                    "images need the processor of a vision-language model: set tokenizer to the directory or hub id of "
                    "one"
                )
            self.image_store = ImageStore(reader().load_processor(self.tokenizer_source))
            if self._unchecked:
                raise _FirstImage
        return self.image_store

    def number_images(self, images: Sequence[EncodedImage]) -> tuple[int, ...]:
        """Return the number of each image of a text, among all images of the data."""
        return self._store.add(images) if images else ()

    def chat(self, fields: Fields) -> Chat:
        """Return the chat template with the tools and variables of a row."""
        options, ends = self.chat_template_kwargs, self.end_tokens[1:]
        return chat_of(self.tokenizer, fields, options, self.tools, expand=self._expand, further_ends=ends)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens at which answers end: the tokenizer's end token, then the model's from its generation settings."""
        return end_tokens_of(self.tokenizer, self.tokenizer_source)

    def end_token_warning(self, further: Sequence[int] = ()) -> str:
        """Return a warning if the chat template ends messages with a token at which responses do not end.

        Args:
            further: tokens that end a response, in addition to the end tokens of the tokenizer and of the model beside
                it.
        """
        end = Chat(self.tokenizer, self.tools, self.chat_template_kwargs).end_of_turn()
        ends = (*self.end_tokens, *further)
        if end is None or end in ends or not any(report.has_messages for report in self.reports.values()):
            return ""
        token, own_end = (self.tokenizer.convert_ids_to_tokens(index) for index in (end, ends[0]))
        return (
            f"the chat template ends a message of the assistant with {token!r} (id {end}), but responses end with the "
            f"tokenizer's end token {own_end!r} (id {ends[0]}): {self.end_token_remedy(end)}, so that responses do not "
            f"continue after the answer"
        )

    def end_token_remedy(self, end: int) -> str:
        """Return what you can set so that responses end at a token."""
        return (
            f"set another eos_token in the tokenizer, or eos_token_id: [{self.end_tokens[0]}, {end}] in the model's "
            f"generation_config.json"
        )

    def _expand(self, text: str, images: Sequence[EncodedImage]) -> str:
        if self.image_store is None and not images:
            return text
        return self._store.processor.expand(text, images)

    @property
    def date_warning(self) -> str:
        """Warning about a chat template that writes today's date into messages, empty if it does not."""
        chat = Chat(self.tokenizer, self.tools, self.chat_template_kwargs)
        if not any(report.has_messages for report in self.reports.values()) or not chat.writes_date():
            return ""
        remedy = "use a template with a fixed date"
        if "date_string" in chat.template:
            remedy = "fix it, such as by chat_template_kwargs: {date_string: 26 Jul 2024}"
        return (
            f"the chat template writes today's date, so that a run that is resumed on another day, or repeated, has "
            f"other prompts: {remedy}"
        )

    @property
    def ignored_tools(self) -> str:
        """Warning about ``tools`` that the chat template does not render, empty if it renders them."""
        if not self.tools:
            return ""
        probe = [{"role": "user", "content": "question"}]
        plain = Chat(self.tokenizer, None, self.chat_template_kwargs)
        with_tools = Chat(self.tokenizer, self.tools, self.chat_template_kwargs)
        try:
            if plain.render(probe, "prompt") != with_tools.render(probe, "prompt"):
                return ""
        except BadRow:  # no template, or one that rejects this message
            return ""
        names = ", ".join(schema["function"]["name"] for schema in self.tools)
        return (
            f"the chat template does not render tools, so no prompt describes {names}: describe them in the prompts, "
            f"or use a tokenizer whose template has tools"
        )

    def split(self, text: str) -> tuple[str, str]:
        """Split a text into prompt and answer after the last ``split_after``.

        Raises:
            BadRow: the marker does not occur, or nothing follows it.
        """
        assert self.split_after is not None
        head, marker, tail = text.rpartition(self.split_after)
        if not marker:
            raise BadRow(f"the marker {self.split_after!r} does not occur in the text")
        if not tail.strip():
            raise BadRow(f"nothing follows the last {self.split_after!r}")
        return self.without_images(head + marker), tail

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without special tokens, and record the parts that the tokenizer does not know."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            self.note_unknown(text)
        return ids

    def note_unknown(self, text: str) -> None:
        """Record the parts of the current row's text that the tokenizer does not know."""
        self._notes.unknown.update(unknown_parts(self.tokenizer, text))

    def excess(self, tokens: int, label: str, has_images: bool = False) -> int:
        """Return the number of tokens to cut, 0 if the text fits.

        Args:
            tokens: number of tokens of the text.
            label: what error messages call the text.
            has_images: whether the text contains images. Their tokens cannot be cut.

        Raises:
            BadRow: the text is too long, and ``too_long`` is not a cut or the text has images.
        """
        if tokens > self.max_tokens and has_images:
            raise_too_long(tokens, self.max_tokens, f"{label}, with its images,", self.too_long, _IMAGES_ADVICE)
        if tokens > self.max_tokens and self.too_long in ("bad_row", "drop"):
            raise_too_long(tokens, self.max_tokens, label, self.too_long)
        return max(tokens - self.max_tokens, 0)

    def within_limit(self, ids: list[int], label: str, has_images: bool = False) -> list[int]:
        """Return the ids, cut to ``max_tokens`` if there are more and ``too_long`` is a cut.

        Raises:
            BadRow: there are too many ids, and ``too_long`` is not a cut or the text has images.
        """
        if excess := self.excess(len(ids), label, has_images):
            self.count_cut(label)
            return cut(ids, excess, self.too_long)
        return ids

    def count_cut(self, label: str) -> None:
        """Record the cut of the current row. It is counted once, and only if the row is used."""
        self._notes.cut = f"{label} to {self.max_tokens} tokens ({self.too_long})"
