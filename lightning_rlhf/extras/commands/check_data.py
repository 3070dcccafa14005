"""``lightning-rlhf check-data --config x.yaml``: check and describe the data of a run, without model weights."""

from __future__ import annotations

import itertools
import json
import operator
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.callbacks.loop.rollout_settings import NO_REWARD, check_texts_only
from lightning_rlhf.cli.constructors import constructor_errors
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.merging import merged_settings
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.columns import SOURCE_COLUMNS
from lightning_rlhf.data.image_parts import text_of_content
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.tokenizers import unknown_parts
from lightning_rlhf.expected_errors import ExpectedError, UsageError, counted, for_terminal
from lightning_rlhf.extras.algorithms.mixture import MixtureModule
from lightning_rlhf.extras.algorithms.rankings import RankingBatch
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedBatch
from lightning_rlhf.extras.commands.data_images import DataImages, ImageSpan
from lightning_rlhf.extras.commands.preview import example_calls, preview
from lightning_rlhf.extras.commands.run_config import (
    ConfigCLI,
    loop_arguments,
    make_data,
    make_environment,
    make_module,
    parse_run_config,
)
from lightning_rlhf.extras.images.processor import image_token
from lightning_rlhf.extras.rewards.answers import most_frequent_answer, rewards_of_answers
from lightning_rlhf.extras.schema.inputs import mistakes_of_settings
from lightning_rlhf.extras.schema.known import find
from lightning_rlhf.models.positions import check_positions, max_positions
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import ENVIRONMENT, RewardFunction
from lightning_rlhf.rollout.scorer import call_reward_functions, missing_columns, read_columns
from lightning_rlhf.run_checks import check_val_metric
from lightning_rlhf.types import PreferenceBatch, PromptBatch, SequenceBatch

FindSpans = Callable[[Sequence[int]], list[ImageSpan]]
_QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}
_OPEN, _CLOSE = "⟦", "⟧"
_MADE_UP_TURN = "0"  # text of each turn in the conversation that is shown
_MOST_CHARACTERS = 100  # longest value that is shown
_USAGE = """usage: lightning-rlhf check-data --config x.yaml [--json] [options of fit]

Reads the data of a run without building a model, and reports: the columns of each field; the numbers of rows that are
used, dropped with their reasons, and cut; their lengths; whether rewards have their columns, and whether the models
know all tokens and have enough positions; whether the sizes of batches, groups and mini-batches belong together; the
first row as the model reads it, with the trained part in ⟦ ⟧ and a mark with size and tokens for each image; and the
rewards of the correct answers as responses.

  --config x.yaml  the configuration of the run
  --json           print JSON

All options of fit are accepted; lightning-rlhf fit --help lists them:

  lightning-rlhf check-data --config examples/own_task/sft.yaml --data.init_args.max_tokens 16

Exit code 0, or 2 if fit would reject the data."""


class CheckDataCLI(ConfigCLI):
    """Parses the configuration of a run, and ``--json``."""

    shown_command = "check-data"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--json``."""
        parser.add_argument("--json", action="store_true", help="print JSON")


@one_line_errors
def run(arguments: list[str]) -> int:
    """Print a description of a run's data.

    Returns:
        Exit code: 0, or 2 if the configuration or the data has an error.
    """
    if {"--help", "-h"} & set(arguments):
        print(_USAGE)
        return 0
    config = parse_run_config(arguments, CheckDataCLI)
    result = check(config)
    mistakes = mistakes_of_settings(merged_settings(arguments, find).values)
    result.errors += [mistake for mistake in mistakes if mistake not in result.errors]
    print(json.dumps(asdict(result), indent=2) if config["json"] else for_terminal(render(result)))
    for error in result.errors:
        print(f"lightning-rlhf: {for_terminal(error)}", file=sys.stderr)
    if result.errors:
        return 2
    return 0


@dataclass
class CheckedData:
    """Report of ``check-data``.

    Args:
        module: class name of the data module.
        data: description of each part of the data, such as ``train``; see :func:`describe`.
        rewards: labels of those rewards whose columns are in every row.
        read_by_rewards: further columns of the data that each of those rewards reads.
        answer_rewards: means of each reward if the responses are the correct answers (``answer``) and if they are
            empty (``empty``).
        conversation: a conversation with the environment: its text, rewards, end, number of tool calls, and unknown
            parts; None without an environment.
        warnings: sentences about settings that probably are mistakes.
        models: a line about each model.
        errors: the errors that would end the run.
    """

    module: str
    data: dict[str, dict[str, Any]]
    rewards: list[str] = field(default_factory=list)
    read_by_rewards: dict[str, list[str]] = field(default_factory=dict)
    answer_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    conversation: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def warn(self, warning: str | None) -> None:
        """Add a warning; nothing for None or an empty text."""
        if warning:
            self.warnings.append(warning)


def check(config: Namespace) -> CheckedData:
    """Check the data of a configuration.

    Args:
        config: parsed configuration of ``fit``.

    Raises:
        UsageError: the data cannot be read, or belong to another data module.
    """
    data = make_data(config)
    if not isinstance(data, RowsDataModule):
        raise UsageError(f"check-data reads the data modules of lightning_rlhf.data, got {type(data).__name__}")
    module = pkgutil.resolve_name(config["model"]["class_path"])
    module.check_reads(data)
    bad_rows_are_errors = data.on_bad_row == "error"
    data.on_bad_row = "skip"  # to report all bad rows
    data.setup("fit")
    result = CheckedData(type(data).__name__, {name: describe(data, name) for name in data.examples})
    result.warnings += module.unused(data)
    if bad_rows_are_errors:
        result.errors += [report.error_message() for report in data.reports.values() if report.bad]
    # Each has the same arguments and completes the result.
    for step in (_count_batches, _check_texts, _check_images, _check_rewards, _play_conversation, _check_models):
        try:
            step(config, data, result)
        except ExpectedError as error:
            result.errors.append(str(error))
    return result


def describe(data: RowsDataModule, part: str) -> dict[str, Any]:
    """Describe one part of the data, such as ``train``: its numbers of rows and tokens, and its first row."""
    report = data.reports[part]
    examples = data.examples[part]
    lengths = [data.count_tokens(example) for example in examples]
    images = DataImages(data)
    totals = images.describe(examples)
    return {
        "read": report.used + report.dropped.total(),
        "kept": report.used,
        "dropped": dict(report.dropped.most_common()),
        "cut": dict(report.cut.most_common()),
        "columns": dict(report.column_mappings.most_common()),
        "unread": dict(report.unread.most_common()),
        "notes": report.describe_notes(),
        "unknown": report.describe_unknown(),
        "tokens": _quantiles(lengths) | {"all": sum(lengths)},
        "answer_tokens": _answer_tokens(data, part) if isinstance(data, PromptDataModule) else {},
        "most_frequent_answer": most_frequent_answer(data, part) if isinstance(data, PromptDataModule) else None,
        **({"images": totals} if totals else {}),
        "sample": _describe_row(data, images, examples, images.first(examples)),
    }


def _describe_row(
    data: RowsDataModule, images: DataImages, examples: list[Any], number: int
) -> dict[str, dict[str, Any]]:
    """Describe one row of the data, with the images of its prompt."""
    batch = data.collate(examples[number : number + 1], numbers=[number], positions=[0], epoch=0)
    of_row = images.images_of(examples[number])
    sample = describe_batch(batch, data.tokenizer, lambda ids: images.spans(ids, of_row))
    return {label: {**text, "images": images.fields(of_row)} for label, text in sample.items()} if of_row else sample


def _answer_tokens(data: PromptDataModule, part: str) -> dict[str, float]:
    """Return quantiles of the lengths of the correct answers that are texts or numbers.

    They help to choose ``max_response_tokens``.
    """
    if lengths := data.answer_lengths(part):
        return _quantiles(lengths)
    return {}


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    levels = torch.tensor(list(_QUANTILES.values()), dtype=torch.float64)
    quantiles = torch.quantile(torch.tensor(values, dtype=torch.float64), levels)
    return dict(zip(_QUANTILES, quantiles.tolist(), strict=True))


def _count_batches(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Add the number of batches of an epoch.

    Raises:
        ValueError: there are fewer rows than a batch has.
    """
    result.data["train"]["batches"] = len(data.train_dataloader())


def _check_texts(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Add warnings about the chat template, the end token and the longest response."""
    has_messages = any(report.has_messages for report in data.reports.values())
    if getattr(data.tokenizer, "chat_template", None) and not has_messages:
        result.warn(
            "the tokenizer has a chat template, but text columns do not use it: a chat model expects conversations; "
            "data.init_args.as_messages: true converts the texts to messages (page Data of the documentation)"
        )
    result.warn(data.ignored_tools)
    result.warn(data.date_warning)
    loop = loop_arguments(config)
    result.warn(data.end_token_warning(loop.get("stop_token_ids") or ()))
    if not isinstance(data, PromptDataModule):
        return
    limit = loop.get("max_response_tokens")
    if limit and loop.get("environment") is None:
        result.warn(data.length_warning(limit))


def _check_images(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Compare the settings of the rollouts with the images of prompts.

    Raises:
        ValueError: prompts have images, and a setting works with texts only.
    """
    if isinstance(data, PromptDataModule):
        check_texts_only(vars(loop_arguments(config)), data)


def _check_rewards(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Call each reward; add those with their columns in every row, and warnings about the others.

    Raises:
        ValueError: a reward cannot be created or called, no row has its columns, or ``val_metric`` is not one of them.
    """
    loop = loop_arguments(config)
    has_environment = loop.get("environment") is not None
    settings = loop.get("rewards") or []
    if not settings and not has_environment:
        module = make_module(config)
        is_sampled = bool(loop) and isinstance(module, RLHFModule) and not isinstance(module, MixtureModule)
        if is_sampled and module.advantages.needs_rewards and "reward_model" not in module.sources:
            result.warn(f"fit will end: {NO_REWARD}")
        return
    parser = LightningArgumentParser()
    parser.add_argument("--rewards", type=list[RewardFunction])
    with constructor_errors(parser):
        rewards: list[RewardFunction] = parser.instantiate_classes(Namespace(rewards=settings))["rewards"]
    with ExitStack() as stack:
        for reward in rewards:
            stack.callback(reward.close)
        labels = [reward.label for reward in rewards]
        check_val_metric(loop.get("val_metric"), [*labels, ENVIRONMENT] if has_environment else labels)
        if not isinstance(data, PromptDataModule):
            return
        with RewardExecutor(rewards) as executor:
            try:
                call_reward_functions(rewards, executor, data, make_environment(config))
            except ExpectedError as error:  # perhaps because of a row without a column
                missing = [line for reward in rewards for line in missing_columns(reward, data)]
                if not missing:
                    raise
                raise UsageError("; ".join([str(error), *missing])) from error
        if not has_environment:
            for label, values in rewards_of_answers(rewards, data).items():
                result.answer_rewards[label] = {"answer": values.answer, "empty": values.empty}
                result.warn(values.warning(label))
    further = {column for part in result.data.values() for column in part["unread"]}
    for part in result.data.values():
        read = part["unread"] if has_environment else {*read_columns(rewards, part["unread"]), *read_by_loop(loop)}
        part["unread"] = {name: number for name, number in part["unread"].items() if name not in read}
    for reward in rewards:
        missing = missing_columns(reward, data)
        result.warnings += missing
        if not missing:
            result.rewards.append(reward.label)
            result.read_by_rewards[reward.label] = sorted(read_columns([reward], further))


def read_by_loop(loop: Namespace | dict[str, Any]) -> list[str]:
    """Return the columns that every run with rollouts reads, and that of given responses."""
    given = loop.get("given_responses")
    column = (given.get("init_args") or given).get("column", "completion") if given is not None else None
    return [*SOURCE_COLUMNS, *([column] if column else [])]


def _play_conversation(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Add a conversation with the environment, if there is one: a call of each tool, then made-up turns.

    Raises:
        ValueError: the environment cannot be created, or the chat template does not allow conversations.
        RuntimeError: the environment failed.
    """
    environment = make_environment(config)
    if environment is None or not isinstance(data, PromptDataModule):
        return
    calls = example_calls(environment)
    completion = preview(environment, data, [*calls, _MADE_UP_TURN])
    record = completion.conversation
    assert record is not None
    assert completion.sampled is not None
    ids, sampled = [*record.prompt_ids, *completion.token_ids], [*[False] * len(record.prompt_ids), *completion.sampled]
    images = DataImages(data)
    spans = images.spans(ids, (*images.images_of(data.examples["train"][0]), *record.images))
    text = _marked(ids, sampled, data.tokenizer, spans)
    written = [text_of_content(each["content"], "") for each in record.messages if each["role"] != "assistant"]
    unknown = Counter(part for content in written for part in unknown_parts(data.tokenizer, content))
    result.conversation = {
        "text": text,
        "rewards": record.turn_rewards,
        "end": record.stop,
        "calls": len(calls),
        "unknown": dict(unknown.most_common()),
    }


def _check_models(config: Namespace, data: RowsDataModule, result: CheckedData) -> None:
    """Compare the configurations of the models with the data, and add a line for each model.

    A model that does not exist yet is not an error in the data: another run may write it.

    Raises:
        ValueError: a model has fewer tokens than the tokenizer, or fewer positions than the longest text, or reads no
            images where the data have some.
    """
    sources = {}
    for name, source in make_module(config).sources.items():
        try:
            model_config = source.hf_config()
        except FileNotFoundError as error:
            result.models.append(f"{name}: not compared with the data, because there is {error}")
            continue
        sources[f"the {name}"] = source
        if data.image_store is not None:
            image_token(model_config, f"the {name}")
        limit = max_positions(model_config)
        positions = "texts of any length"
        if limit is not None:
            positions = f"{limit} positions"
        result.models.append(f"{name}: {model_config.get_text_config().vocab_size} tokens, {positions}")
    if sources:
        check_vocabularies(sources, data.tokenizer)
        check_positions(sources, data.longest_text_tokens, loop_arguments(config).get("max_response_tokens") or 0)


def describe_batch(batch: Any, tokenizer: Any, spans: FindSpans) -> dict[str, dict[str, Any]]:
    """Decode a batch of one row.

    Args:
        batch: batch of one of our data modules.
        spans: function of the tokens of a text that returns the positions of its images.

    Returns:
        For each text: its content with the trained part marked, and its numbers of tokens and trained tokens.
    """
    if isinstance(batch, PromptBatch):
        (prompt,) = batch
        ids = prompt.token_ids
        text = _marked(ids, [False] * len(ids), tokenizer, spans(ids))
        columns = {name: str(value) for name, value in prompt.columns.items() if name != "images"}
        return {"prompt": {"text": text, "tokens": len(ids), "trained": 0, "columns": columns}}
    if isinstance(batch, PreferenceBatch):
        texts = {"chosen": batch.chosen, "rejected": batch.rejected}
    elif isinstance(batch, RankingBatch):
        ranks = batch.ranks[0].tolist()
        names = [
            f"answer of rank {rank}" + f" ({ranks[:i].count(rank) + 1})" * (ranks.count(rank) > 1)
            for i, rank in enumerate(ranks)
        ]
        texts = {name: batch.texts[[i]] for i, name in enumerate(names)}
    elif isinstance(batch, UnpairedBatch):
        texts = {"desirable text" if batch.desirable[0] else "undesirable text": batch.texts}
    else:
        texts = {"text": batch}
    described: dict[str, dict[str, Any]] = {}
    for label, rows in texts.items():
        described |= _describe_texts(label, rows, tokenizer, spans)
    return described


def _describe_texts(label: str, batch: SequenceBatch, tokenizer: Any, spans: FindSpans) -> dict[str, dict[str, Any]]:
    """Describe the texts of a row by their labels: one, or one for each turn to learn."""
    length = int(batch.lengths[0])
    ids, mask = batch.input_ids[0, :length].tolist(), batch.loss_mask[0, :length].tolist()
    starts = [] if batch.text_starts is None else batch.text_starts[0].nonzero().flatten().tolist()
    described = {}
    for turn, (first, last) in enumerate(itertools.pairwise([0, *starts, length]), start=1):
        text = _marked(ids[first:last], mask[first:last], tokenizer, spans(ids[first:last]))
        name = f"{label}, turn {turn}" if starts else label
        described[name] = {"text": text, "tokens": last - first, "trained": sum(mask[first:last])}
    return described


def _marked(ids: Sequence[int], is_trained: Sequence[bool], tokenizer: Any, images: Sequence[ImageSpan] = ()) -> str:
    """Decode tokens, with marks around those that are trained on, and a mark in the place of each image."""
    text, start = "", 0
    for span in (*images, ImageSpan(len(ids), len(ids), "")):
        tokens = zip(is_trained[start : span.start], ids[start : span.start], strict=True)
        for trained, group in itertools.groupby(tokens, key=operator.itemgetter(0)):
            part = tokenizer.decode([token for _, token in group])
            text += f"{_OPEN}{part}{_CLOSE}" if trained else part
        text, start = text + span.mark, span.end
    return text


def render(result: CheckedData) -> str:
    """Render the result of :func:`check` as text."""
    lines = [result.module]
    for name, part in result.data.items():
        lines += ["", f"{name}: {counted(part['read'], 'row')} read, {part['kept']} kept"]
        for label in ("columns", "dropped", "cut"):
            lines += [f"  {label}: {counted(count, 'row')}: {reason}" for reason, count in part[label].items()]
        if part["unread"]:
            lines.append(f"  columns that nothing reads: {', '.join(part['unread'])}")
        lines += [f"  {note}" for note in part["notes"]]
        lines.append("  tokens: " + ", ".join(f"{key} {value:g}" for key, value in part["tokens"].items()))
        if part["answer_tokens"]:
            answers = ", ".join(f"{key} {part['answer_tokens'][key]:g}" for key in ("median", "most"))
            lines.append(f"  tokens of the correct answers, without the end token: {answers}")
        if part["most_frequent_answer"]:
            answer, fraction = part["most_frequent_answer"]
            lines.append(f"  most frequent correct answer: '{_one_line(answer)}', {fraction:.3f} of the rows")
        if part["unknown"]:
            lines.append(f"  {part['unknown']}")
        if totals := part.get("images"):
            numbers = f"{counted(totals['rows'], 'row')} with images, {counted(totals['distinct'], 'distinct image')}"
            tokens = f"mean {totals['tokens_mean']:g}, most {totals['tokens_most']}"
            lines.append(f"  images: {numbers}, their tokens per row: {tokens}")
        if "batches" in part:
            lines.append(f"  batches of an epoch: {part['batches']}")
        for label, sample in part["sample"].items():
            lines += _lines_of(label, sample)
    if result.rewards:
        lines += ["", f"reward functions whose columns are all there: {', '.join(result.rewards)}"]
    lines += [f"  {label} reads: {', '.join(read)}" for label, read in result.read_by_rewards.items() if read]
    for label in result.rewards:
        if values := result.answer_rewards.get(label):
            means = f"{values['answer']:.3g}, of empty responses: {values['empty']:.3g}"
            lines.append(f"  {label} of the correct answers as responses: {means}")
    if conversation := result.conversation:
        calls = "a call of each tool, then " if conversation["calls"] else ""
        turns = f"a conversation whose turns are {calls}{_MADE_UP_TURN!r}"
        lines += ["", f"{turns}; it ended with {conversation['end']}:"]
        lines += [f"    | {line}" for line in conversation["text"].split("\n")]
        lines.append(f"  rewards of its turns: {', '.join(f'{reward:g}' for reward in conversation['rewards'])}")
        if conversation["unknown"]:
            parts = ", ".join(f"{part!r} {count}" for part, count in conversation["unknown"].items())
            lines.append(f"  the tokenizer does not know parts of the environment's texts: {parts}")
    if result.warnings:
        lines += ["", *(f"warning: {warning}" for warning in result.warnings)]
    if result.models:
        lines += ["", *result.models]
    if not result.errors:
        lines += ["", "the data can be used"]
    return "\n".join(lines)


def _lines_of(label: str, sample: dict[str, Any]) -> list[str]:
    """Render a text of the row that is shown, with its columns and the files of its images."""
    trained = ""
    if sample["trained"]:
        trained = f", {sample['trained']} of them trained on"
    images = f" with {counted(len(sample['images']), 'image')}" if "images" in sample else ""
    lines = [f"  first {label}{images}, {counted(sample['tokens'], 'token')}{trained}:"]
    lines += [f"    | {line}" for line in sample["text"].split("\n")]
    lines += [f"    {column} = {_one_line(value)}" for column, value in sample.get("columns", {}).items()]
    files = [image["file"] for image in sample.get("images", ())]
    lines += [f"    image {number}: {file}" for number, file in enumerate(files, 1) if file]
    return lines


def _one_line(value: str) -> str:
    """Return a text in one line, cut if it is long."""
    line = value.replace("\n", "\\n")
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[:_MOST_CHARACTERS]}... ({len(value)} characters)"
