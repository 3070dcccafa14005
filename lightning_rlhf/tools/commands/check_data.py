"""``lightning-rlhf check-data --config x.yaml``: check and describe the data of a run, without model weights."""

from __future__ import annotations

import itertools
import json
import operator
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.config_mistakes import read_settings
from lightning_rlhf.cli.constructors import constructor_errors
from lightning_rlhf.cli.early_checks import mistakes_of_settings
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.tokenizers import unknown_parts
from lightning_rlhf.expected_errors import ExpectedError, UsageError, counted
from lightning_rlhf.models.positions import check_positions, max_positions
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import CONVERSATION_COLUMNS, ENVIRONMENT, RewardFunction
from lightning_rlhf.rollout.answer_rewards import rewards_of_answers
from lightning_rlhf.rollout.preview import example_calls, preview
from lightning_rlhf.rollout.scorer import call_reward_functions, missing_columns
from lightning_rlhf.run_checks import check_val_metric
from lightning_rlhf.tools.commands.run_config import (
    ConfigCLI,
    loop_arguments,
    make_data,
    make_environment,
    make_module,
    parse_run_config,
)
from lightning_rlhf.types import PreferenceBatch, PromptBatch, SequenceBatch, UnpairedBatch

_QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}
_OPEN, _CLOSE = "⟦", "⟧"
_MADE_UP_TURN = "0"  # text of each turn in the conversation that is shown
_MOST_CHARACTERS = 100  # longest value of a column in the report
_USAGE = """usage: lightning-rlhf check-data --config x.yaml [--json] [options of fit]

Reads the data of a run without building a model, and reports: the columns of each field; the numbers of rows that are
used, dropped with their reasons, and cut; their lengths; whether rewards have their columns, and whether the models
know all tokens and have enough positions; whether the sizes of batches, groups and mini-batches belong together; the
first row as the model reads it, with the trained part in ⟦ ⟧; and the rewards of the correct answers as responses.

  --config x.yaml  the configuration of the run
  --json           print JSON

All options of fit are accepted; lightning-rlhf fit --help lists them:

  lightning-rlhf check-data --config examples/own_task/sft.yaml --data.init_args.max_tokens 16

Exit code 0, or 2 if fit would reject the data."""


class CheckDataCLI(ConfigCLI):
    """Parses the configuration of a run, and ``--json``."""

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
    mistakes = mistakes_of_settings(read_settings(arguments))
    result["errors"] += [mistake for mistake in mistakes if mistake not in result["errors"]]
    print(json.dumps(result, indent=2) if config["json"] else render(result))
    for error in result["errors"]:
        print(f"lightning-rlhf: {error}", file=sys.stderr)
    if result["errors"]:
        return 2
    return 0


def check(config: Namespace) -> dict[str, Any]:
    """Check the data of a configuration.

    Args:
        config: parsed configuration of ``fit``.

    Returns:
        The data module's name, a description of each part of the data, the rewards with all their columns in every row,
        warnings, a line for each model, and the errors that would end the run.

    Raises:
        UsageError: the data cannot be read, or belong to another data module.
    """
    data = make_data(config)
    if not isinstance(data, RowsDataModule):
        raise UsageError(f"check-data reads the data modules of lightning_rlhf.data, got {type(data).__name__}")
    pkgutil.resolve_name(config["model"]["class_path"]).check_reads(data)
    reports_bad_rows = data.on_bad_row == "error"
    data.on_bad_row = "skip"  # to report all bad rows
    data.setup("fit")
    result: dict[str, Any] = {
        "module": type(data).__name__,
        "data": {name: describe(data, name) for name in data.examples},
        "rewards": [],
        "answer_rewards": {},
        "conversation": None,
        "warnings": [*unused_template(data), *([data.ignored_tools] if data.ignored_tools else [])],
        "models": [],
        "errors": [report.error_message() for report in data.reports.values() if reports_bad_rows and report.bad],
    }
    checks: list[Callable[[], None]] = [
        lambda: result["data"]["train"].update(batches=len(data.train_dataloader())),
        lambda: _check_rewards(config, data, result),
        lambda: _play_conversation(config, data, result),
        lambda: _check_models(config, data, result["models"]),
    ]
    for run_check in checks:
        try:
            run_check()
        except ExpectedError as error:
            result["errors"].append(str(error))
    return result


def unused_template(data: RowsDataModule) -> list[str]:
    """Return a warning if a chat model's template is not used because the data are plain text."""
    columns = [column for report in data.reports.values() for column in report.column_mappings]
    if not getattr(data.tokenizer, "chat_template", None) or any("messages)" in column for column in columns):
        return []
    return [
        "the tokenizer has a chat template, but text columns do not use it: a chat model expects conversations; "
        "data.init_args.as_messages: true converts the texts to messages (page Data of the documentation)"
    ]


def describe(data: RowsDataModule, part: str) -> dict[str, Any]:
    """Describe one part of the data, such as ``train``."""
    report = data.reports[part]
    examples = data.examples[part]
    lengths = [data.tokens(example) for example in examples]
    return {
        "read": report.used + report.dropped.total(),
        "kept": report.used,
        "dropped": dict(report.dropped.most_common()),
        "cut": dict(report.cut.most_common()),
        "columns": dict(report.column_mappings.most_common()),
        "unknown": report.describe_unknown(),
        "tokens": _quantiles(lengths) | {"all": sum(lengths)},
        "answer_tokens": _answer_tokens(data, part) if isinstance(data, PromptDataModule) else {},
        "most_frequent_answer": data.most_frequent_answer(part) if isinstance(data, PromptDataModule) else None,
        "sample": describe_batch(data.collate(examples[:1], [0], [0], 0), data.tokenizer),
    }


def _answer_tokens(data: PromptDataModule, part: str) -> dict[str, float]:
    """Return quantiles of the lengths of the correct answers that are texts or numbers, for max_response_tokens."""
    if lengths := data.answer_lengths(part):
        return _quantiles(lengths)
    return {}


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    levels = torch.tensor(list(_QUANTILES.values()), dtype=torch.float64)
    return dict(
        zip(_QUANTILES, torch.quantile(torch.tensor(values, dtype=torch.float64), levels).tolist(), strict=True)
    )


def _check_rewards(config: Namespace, data: RowsDataModule, result: dict[str, Any]) -> None:
    """Call each reward; add to the result those with their columns in every row, and warnings about the others.

    Raises:
        ValueError: a reward cannot be created or called, no row has its columns, or ``val_metric`` is not one of them.
    """
    arguments = loop_arguments(config)
    if isinstance(data, PromptDataModule):
        result["warnings"] += filter(None, [data.end_token_warning(arguments.get("stop_token_ids") or ())])
        limit = arguments.get("max_response_tokens")
        if limit and arguments.get("environment") is None:
            result["warnings"] += filter(None, [data.length_warning(limit)])
    further = [] if arguments.get("environment") is None else CONVERSATION_COLUMNS
    settings = arguments.get("rewards") or []
    if not settings and not further:
        return
    parser = LightningArgumentParser()
    parser.add_argument("--rewards", type=list[RewardFunction])
    with constructor_errors(parser):
        rewards = parser.instantiate_classes(Namespace(rewards=settings))["rewards"]
    labels = [reward.label for reward in rewards] + ([ENVIRONMENT] if further else [])
    check_val_metric(arguments.get("val_metric"), labels)
    if not isinstance(data, PromptDataModule):
        return
    try:
        with RewardExecutor(rewards) as executor:
            call_reward_functions(rewards, executor, data, make_environment(config))
        if not further:
            for label, values in rewards_of_answers(rewards, data).items():
                result["answer_rewards"][label] = {"answer": values.answer, "empty": values.empty}
                result["warnings"] += filter(None, [values.warning(label)])
    finally:
        for reward in rewards:
            reward.close()
    for reward in rewards:
        missing = missing_columns(reward, data)
        result["warnings"] += missing
        if not missing:
            result["rewards"].append(reward.label)


def _play_conversation(config: Namespace, data: RowsDataModule, result: dict[str, Any]) -> None:
    """Add to the result a conversation with the environment, if there is one: a call of each tool, then made-up turns.

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
    text = str(data.tokenizer.decode(record.prompt_ids))
    text += _marked(completion.token_ids, completion.sampled, data.tokenizer)
    written = [message["content"] for message in record.messages if message["role"] != "assistant"]
    unknown = Counter(part for content in written for part in unknown_parts(data.tokenizer, content))
    result["conversation"] = {
        "text": text,
        "rewards": record.turn_rewards,
        "end": record.stop,
        "calls": len(calls),
        "unknown": dict(unknown.most_common()),
    }


def _check_models(config: Namespace, data: RowsDataModule, lines: list[str]) -> None:
    """Compare the configurations of the models with the data, and add a line for each model.

    A model that does not exist yet is not an error in the data: another run may write it.

    Raises:
        ValueError: a model has fewer tokens than the tokenizer, or fewer positions than the longest text.
    """
    sources = {}
    for name, source in make_module(config).sources.items():
        try:
            model_config = source.hf_config()
        except FileNotFoundError as error:
            lines.append(f"{name}: not compared with the data, because there is {error}")
            continue
        sources[f"the {name}"] = source
        limit = max_positions(model_config)
        positions = "texts of any length"
        if limit is not None:
            positions = f"{limit} positions"
        lines.append(f"{name}: {model_config.get_text_config().vocab_size} tokens, {positions}")
    if sources:
        check_vocabularies(sources, data.tokenizer)
        check_positions(sources, data.longest_text, loop_arguments(config).get("max_response_tokens") or 0)


def describe_batch(batch: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Decode a batch of one row.

    Args:
        batch: batch of one of our data modules.
        tokenizer: tokenizer of the run.

    Returns:
        For each text: its content with the trained part marked, and its numbers of tokens and trained tokens.
    """
    if isinstance(batch, PromptBatch):
        text = tokenizer.decode(batch.token_ids[0])
        columns = {name: str(values[0]) for name, values in batch.columns.items()}
        return {"prompt": {"text": text, "tokens": len(batch.token_ids[0]), "trained": 0, "columns": columns}}
    if isinstance(batch, PreferenceBatch):
        return {
            "chosen": _describe_text(batch.chosen, tokenizer),
            "rejected": _describe_text(batch.rejected, tokenizer),
        }
    if isinstance(batch, UnpairedBatch):
        name = "desirable text" if batch.desirable[0] else "undesirable text"
        return {name: _describe_text(batch.texts, tokenizer)}
    return {"text": _describe_text(batch, tokenizer)}


def _describe_text(batch: SequenceBatch, tokenizer: Any) -> dict[str, Any]:
    length = int(batch.lengths[0])
    text = _marked(batch.input_ids[0, :length].tolist(), batch.loss_mask[0, :length].tolist(), tokenizer)
    return {"text": text, "tokens": length, "trained": int(batch.loss_mask.sum())}


def _marked(ids: Sequence[int], is_trained: Sequence[bool], tokenizer: Any) -> str:
    """Decode tokens, with marks around those that are trained on."""
    text = ""
    for trained, group in itertools.groupby(zip(is_trained, ids, strict=True), key=operator.itemgetter(0)):
        part = tokenizer.decode([token for _, token in group])
        text += f"{_OPEN}{part}{_CLOSE}" if trained else part
    return text


def render(result: dict[str, Any]) -> str:
    """Render the result of :func:`check` as text."""
    lines = [result["module"]]
    for name, part in result["data"].items():
        lines += ["", f"{name}: {counted(part['read'], 'row')} read, {part['kept']} kept"]
        for label in ("columns", "dropped", "cut"):
            lines += [f"  {label}: {counted(count, 'row')}: {reason}" for reason, count in part[label].items()]
        lines.append("  tokens: " + ", ".join(f"{key} {value:g}" for key, value in part["tokens"].items()))
        if part["answer_tokens"]:
            answers = ", ".join(f"{key} {part['answer_tokens'][key]:g}" for key in ("median", "most"))
            lines.append(f"  tokens of the correct answers, without the end token: {answers}")
        if part["most_frequent_answer"]:
            answer, fraction = part["most_frequent_answer"]
            lines.append(f"  most frequent correct answer: {_short(answer)!r}, {fraction:.3f} of the rows")
        if part["unknown"]:
            lines.append(f"  {part['unknown']}")
        if "batches" in part:
            lines.append(f"  batches of an epoch: {part['batches']}")
        for label, sample in part["sample"].items():
            trained = ""
            if sample["trained"]:
                trained = f", {sample['trained']} of them trained on"
            lines.append(f"  first {label}, {counted(sample['tokens'], 'token')}{trained}:")
            lines += [f"    | {line}" for line in sample["text"].split("\n")]
            lines += [f"    {column} = {_short(value)}" for column, value in sample.get("columns", {}).items()]
    if result["rewards"]:
        lines += ["", f"reward functions whose columns are all there: {', '.join(result['rewards'])}"]
    for label, values in result["answer_rewards"].items():
        answer, empty = values["answer"], values["empty"]
        lines.append(f"  {label} of the correct answers as responses: {answer:.3g}, of empty responses: {empty:.3g}")
    if conversation := result["conversation"]:
        calls = "a call of each tool, then " if conversation["calls"] else ""
        turns = f"a conversation whose turns are {calls}{_MADE_UP_TURN!r}"
        lines += ["", f"{turns}; it ended with {conversation['end']}:"]
        lines += [f"    | {line}" for line in conversation["text"].split("\n")]
        lines.append(f"  rewards of its turns: {', '.join(f'{reward:g}' for reward in conversation['rewards'])}")
        if conversation["unknown"]:
            parts = ", ".join(f"{part!r} {count}" for part, count in conversation["unknown"].items())
            lines.append(f"  the tokenizer does not know parts of the environment's texts: {parts}")
    if result["warnings"]:
        lines += ["", *(f"warning: {warning}" for warning in result["warnings"])]
    if result["models"]:
        lines += ["", *result["models"]]
    if not result["errors"]:
        lines += ["", "the data can be used"]
    return "\n".join(lines)


def _short(value: str) -> str:
    line = value.replace("\n", "\\n")
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[:_MOST_CHARACTERS]}... ({len(value)} characters)"
