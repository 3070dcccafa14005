"""``lightning-rlhf data check --config x.yaml``: what a run would make of its data; no weight is loaded."""

from __future__ import annotations

import itertools
import json
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.checks import missing_columns
from lightning_rlhf.cli.main import is_for_users, refusals_told
from lightning_rlhf.cli.plan import is_made_of
from lightning_rlhf.cli.understood import ConfigCLI, data_of, module_of, understood
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.models.positions import check_positions, max_positions
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.rewards.function import RewardFunction, check_rewards
from lightning_rlhf.types import PreferenceBatch, PromptBatch, SequenceBatch, UnpairedBatch

_QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}
_OPEN, _CLOSE = "⟦", "⟧"
_USAGE = """usage: lightning-rlhf data check --config x.yaml [--json] [options of fit]

Reads the data of a run and makes no model: which column was taken for what, how many rows are used, left out for which
reason and cut, how long they are, whether rewards find their columns and models know all tokens and have positions
enough, and the first row as the model will see it, what is learnt from in ⟦ ⟧.

  --config x.yaml  the configuration of the run
  --json           print JSON

Every option of fit may be given too, and changes what is checked; lightning-rlhf fit --help lists them:

  lightning-rlhf data check --config examples/own_task/sft.yaml --data.init_args.max_tokens 16

Exit code 0, or 2 if the run would be refused."""


class DataCheckCLI(ConfigCLI):
    """A run's configuration, and whether the answer is for people."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what is asked beside the configuration."""
        parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: list[str]) -> int:
    """Print what a run makes of its data.

    Args:
        arguments: behind ``data``: ``check``, then those of ``fit`` and, if wanted, ``--json``.

    Returns:
        Exit code: 0, or 2 if something is wrong with the configuration or the data.
    """
    if {"--help", "-h"} & set(arguments):
        print(_USAGE)
        return 0
    if arguments[:1] != ["check"]:
        word = f"there is no command 'data {arguments[0]}'; " if arguments else ""
        print(f"lightning-rlhf: {word}did you mean 'data check'?", file=sys.stderr)
        return 2
    config = understood(arguments[1:], DataCheckCLI)
    try:
        found = check(config)
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if config["json"] else shown(found))
    for refusal in found["refusals"]:
        print(f"lightning-rlhf: {refusal}", file=sys.stderr)
    return 2 if found["refusals"] else 0


def check(config: Namespace) -> dict[str, Any]:
    """What is found out about the data of a configuration.

    Args:
        config: of ``fit``, parsed.

    Returns:
        The data module's name, a description of each part of the data, the rewards that found what they need in every
        row, what some rows lack, what was seen of the models, and what would end the run.

    Raises:
        ValueError: the data cannot be read at all, or the configuration has another kind of data.
    """
    data = data_of(config)
    if not isinstance(data, RowsDataModule):
        raise ValueError(f"data check reads the data modules of lightning_rlhf.data, got {type(data).__name__}")
    pkgutil.resolve_name(config["model"]["class_path"]).check_reads(data)
    refuse, data.on_bad_row = data.on_bad_row == "error", "skip"  # to see more than the first bad rows
    data.setup("fit")
    parts = {name: described(data, name) for name in data.examples}
    refusals = [report.error_message() for report in data.reports.values() if refuse and report.bad]
    rewards, warnings, models = list[str](), unused_template(data), list[str]()
    for check_part in (
        lambda: parts["train"].update(batches=len(data.train_dataloader())),
        lambda: rewards.extend(checked_rewards(config, data, warnings)),
        lambda: models.extend(checked_models(config, data)),
    ):
        try:
            check_part()
        except ValueError as error:
            refusals.append(str(error))
    return {
        "module": type(data).__name__,
        "data": parts,
        "rewards": rewards,
        "warnings": warnings,
        "models": models,
        "refusals": refusals,
    }


def unused_template(data: RowsDataModule) -> list[str]:
    """Return a warning where a chat model's template is not used because the data are plain text.

    Args:
        data: read.
    """
    columns = [column for report in data.reports.values() for column in report.column_mappings]
    if not getattr(data.tokenizer, "chat_template", None) or any("messages)" in column for column in columns):
        return []
    return [
        "the tokenizer has a chat template, which text columns do not use: a chat model is used to conversations; "
        "data.init_args.as_messages: true makes them of the texts (docs/data.md)"
    ]


def described(data: RowsDataModule, part: str) -> dict[str, Any]:
    """One part of the data, such as ``train``."""
    report, examples = data.reports[part], data.examples[part]
    lengths = torch.tensor([data.tokens(example) for example in examples], dtype=torch.float64)
    quantiles = torch.quantile(lengths, torch.tensor(list(_QUANTILES.values()), dtype=torch.float64)).tolist()
    batch = data.collate(examples[:1], [0], [0], 0)
    return {
        "read": report.used + report.dropped.total(),
        "kept": report.used,
        "dropped": dict(report.dropped.most_common()),
        "cut": dict(report.cut.most_common()),
        "columns": dict(report.column_mappings.most_common()),
        "unknown": report.describe_unknown(),
        "tokens": dict(zip(_QUANTILES, quantiles, strict=True)) | {"all": int(lengths.sum())},
        "sample": rendered(batch, data.tokenizer),
    }


def checked_rewards(config: Namespace, data: RowsDataModule, warnings: list[str]) -> list[str]:
    """Names of the rewards of a configuration that find what they need in every row of the data.

    Args:
        config: of ``fit``, parsed.
        data: read.
        warnings: to which is added what the others lack in some rows.

    Raises:
        ValueError: one does not.
    """
    given = loop_of(config).get("rewards")
    if not given:
        return []
    parser = LightningArgumentParser()
    parser.add_argument("--rewards", type=list[RewardFunction])
    with refusals_told(parser):
        rewards = parser.instantiate_classes(Namespace(rewards=given))["rewards"]
    first = [data.collate(examples[:1], [0], [0], 0) for examples in data.examples.values()]
    check_rewards(rewards, sorted({name for batch in first for name in batch.columns}))
    lacking = (
        {reward.label: missing_columns(reward, data) for reward in rewards}
        if isinstance(data, PromptDataModule)
        else {}
    )
    warnings += [gap for found in lacking.values() for gap in found]
    return [reward.label for reward in rewards if not lacking.get(reward.label)]


def checked_models(config: Namespace, data: RowsDataModule) -> list[str]:
    """What is seen of the models in their configurations alone; no weight is loaded.

    A model that is not there yet is no fault of the data: another run may be about to write it.

    Returns:
        A line for each model, or for why it was not looked at.

    Raises:
        ValueError: a model knows fewer tokens than the tokenizer, or reads shorter texts than there are.
    """
    lines, roles, module = [], {}, module_of(config)
    for name, source in module.sources.items():
        try:
            own = source.hf_config()
        except FileNotFoundError as error:
            lines.append(f"{name}: not compared with the data, because there is {error}")
            continue
        roles[f"the {name}"] = source
        limit = max_positions(own)
        reads = "texts of any length" if limit is None else f"{limit} positions"
        lines.append(f"{name}: {own.get_text_config().vocab_size} tokens, {reads}")
    if roles:
        check_vocabularies(roles, data.tokenizer)
        check_positions(roles, data.longest_text, loop_of(config).get("max_response_tokens") or 0)
    return lines


def loop_of(config: Namespace) -> Namespace:
    """The arguments of a configuration's RolloutLoop; none where it has none."""
    loops = [own for own in config["trainer"]["callbacks"] or () if is_made_of(own, RolloutLoop)]
    return loops[0]["init_args"] if loops else Namespace()


def rendered(batch: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """The text or texts of a batch of one row, with what is learnt from marked.

    Args:
        batch: of one of our data modules.
        tokenizer: of the run.

    Returns:
        A name for each text, with the text, its tokens and those that are learnt from.
    """
    if isinstance(batch, PromptBatch):
        text = tokenizer.decode(batch.token_ids[0])
        columns = {name: str(values[0]) for name, values in batch.columns.items()}
        return {"prompt": {"text": text, "tokens": len(batch.token_ids[0]), "learnt": 0, "columns": columns}}
    if isinstance(batch, PreferenceBatch):
        return {"chosen": _marked(batch.chosen, tokenizer), "rejected": _marked(batch.rejected, tokenizer)}
    if isinstance(batch, UnpairedBatch):
        name = "a desirable text" if batch.desirable[0] else "an undesirable text"
        return {name: _marked(batch.texts, tokenizer)}
    return {"text": _marked(batch, tokenizer)}


def _marked(batch: SequenceBatch, tokenizer: Any) -> dict[str, Any]:
    length = int(batch.lengths[0])
    tokens = list(zip(batch.input_ids[0, :length].tolist(), batch.loss_mask[0, :length].tolist(), strict=True))
    text = ""
    for learnt, run_of in itertools.groupby(tokens, key=lambda token: token[1]):
        part = tokenizer.decode([token for token, _ in run_of])
        text += f"{_OPEN}{part}{_CLOSE}" if learnt else part
    return {"text": text, "tokens": length, "learnt": int(batch.loss_mask.sum())}


def shown(found: dict[str, Any]) -> str:
    """What was found out, for people."""
    lines = [found["module"]]
    for name, part in found["data"].items():
        lines += ["", f"{name}: {part['read']} rows read, {part['kept']} kept"]
        lines += _counted("columns", part["columns"]) + _counted("dropped", part["dropped"])
        lines += _counted("cut", part["cut"])
        told = ", ".join(f"{key} {value:g}" for key, value in part["tokens"].items())
        lines.append(f"  tokens: {told}")
        if part["unknown"]:
            lines.append(f"  {part['unknown']}")
        if "batches" in part:
            lines.append(f"  batches of an epoch: {part['batches']}")
        for what, sample in part["sample"].items():
            learnt = f", {sample['learnt']} of them learnt from" if sample["learnt"] else ""
            lines += [f"  first {what}, {sample['tokens']} tokens{learnt}:", *_indented(sample["text"])]
            lines += [f"    {column} = {_short(value)}" for column, value in sample.get("columns", {}).items()]
    if found["rewards"]:
        lines += ["", f"rewards that find all they need: {', '.join(found['rewards'])}"]
    if found["warnings"]:
        lines += ["", *(f"warning: {warning}" for warning in found["warnings"])]
    if found["models"]:
        lines += ["", *found["models"]]
    return "\n".join(lines)


def _counted(what: str, counts: dict[str, int]) -> list[str]:
    return [f"  {what}: {count} rows: {reason}" for reason, count in counts.items()]


def _indented(text: str) -> Sequence[str]:
    return [f"    | {line}" for line in text.split("\n")]


def _short(value: str) -> str:
    line = value.replace("\n", "\\n")
    return line if len(line) <= 100 else f"{line[:100]}... ({len(value)} characters)"
