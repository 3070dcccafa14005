"""``lightning-rlhf evaluate``: score a file of responses, for each source of data."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_rlhf.cli.commands.options import command_parser, parse_columns
from lightning_rlhf.cli.commands.responses_file import (
    ENVIRONMENT_REWARDS,
    FINISH_REASONS,
    OF_CONVERSATIONS,
    OUTPUT_COLUMNS,
    RESPONSES,
    TOKENS,
    write_errors,
)
from lightning_rlhf.cli.commands.scores import ScoredResponses, statistics
from lightning_rlhf.cli.config_files import add_import_folders
from lightning_rlhf.cli.errors import failure_code_1, one_line_errors
from lightning_rlhf.cli.screen import configure_messages
from lightning_rlhf.data.chat import messages_of
from lightning_rlhf.data.columns import PROMPT, REWARD_FIELDS, Columns
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, use_rows
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.references import load_function
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction, check_rewards
from lightning_rlhf.rollout.collect import ENVIRONMENT

ALL = "all"
Extract = Callable[[list[str]], Sequence[Hashable]]  # returns the answers of the responses to one prompt
_EPILOG = """The file was written by generate or verl: each row has a list of responses, and the columns of the reward
functions (ground_truth, reward_model.ground_truth, answer, data_source, ...). Intervals are 95 % intervals.

  lightning-rlhf evaluate answers.jsonl --reward lightning_rlhf.rewards.rules:gsm8k_strict --json report.json
  lightning-rlhf evaluate answers.jsonl --reward my_rewards.py:right --answer my_rewards.py:last_number
"""
_NOT_FOR_REWARDS = ("prompt", "messages", "responses", *OUTPUT_COLUMNS)


@dataclass(frozen=True)
class ResponseRow:
    """A prompt with its responses.

    ``tokens``, ``truncated`` and the columns ``of_conversations`` are empty if the row does not contain them.
    """

    prompt: str
    messages: list[Any]
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]
    source: str
    columns: dict[str, Any]
    of_conversations: dict[str, list[Any]]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("evaluate", "Score a file of responses, for each source of data.", _EPILOG)
    parser.add_argument("file", metavar="FILE", help="rows with responses: .jsonl, .json, .csv, .parquet, ...")
    parser.add_argument(
        "--reward", action="append", default=[], metavar="FUNCTION", help="file.py:name or module:name; can be repeated"
    )
    parser.add_argument("--answer", metavar="FUNCTION", help="extracts answers from responses, for maj@k")
    parser.add_argument(
        "--correct-at", type=float, metavar="REWARD", default=1.0, help="reward of a correct response (default: 1)"
    )
    parser.add_argument("--columns", nargs="+", default=[], metavar="FIELD=COLUMN", help="such as ground_truth=target")
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default: error)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the whole report")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Score responses and print a table.

    Returns:
        Exit code: 0; 2 for a mistake found before the responses were scored; 1 if a reward function failed.
    """
    options = make_parser().parse_args(arguments)
    configure_messages()
    add_import_folders()
    if math.isnan(options.correct_at):
        raise UsageError("--correct-at must be a number, got nan")
    rewards = [RewardFunction(reference) for reference in options.reward]
    extract = load_function(options.answer) if options.answer else None
    rows = read_rows(options.file, parse_columns(options.columns), options.on_bad_row)
    columns = sorted({name for row in rows for name in row.columns})
    _check_rewards(rewards, columns, rows)
    if options.json is not None:
        with write_errors(options.json, "choose another --json"):
            options.json.parent.mkdir(parents=True, exist_ok=True)
    with failure_code_1(shows_cause=True):
        sources = statistics_by_source(score_rows(rows, rewards, columns, extract), options.correct_at)
        report = {"file": options.file, "correct_at": options.correct_at, "sources": sources}
        # In a log no line is cut; names are printed without markup.
        Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(table(report))
        if options.json is not None:
            with write_errors(options.json, "the table is above"):
                options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def read_rows(path: str, columns: dict[str, str], on_bad_row: OnBadRow) -> list[ResponseRow]:
    """Read rows with responses.

    Raises:
        ValueError: rows have no responses, and ``on_bad_row`` is ``error``.
    """
    finder = Columns(columns, ((("responses", RESPONSES),), PROMPT, *REWARD_FIELDS))

    def convert(row: Row) -> ResponseRow:
        fields = finder.find(row)
        if "responses" not in fields:
            raise BadRow(f"no column {RESPONSES!r}, which lightning-rlhf generate writes", "no responses")
        responses = fields["responses"]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
            raise BadRow("the responses are neither a text nor a list of texts", "no responses")
        name = next((name for name in ("messages", "prompt") if name in fields), None)
        prompt = "" if name is None else fields[name] or ""
        messages = [] if isinstance(prompt, str) else messages_of(prompt, "prompt")
        tokens = _list_of(row, TOKENS, len(responses))
        reasons = _list_of(row, FINISH_REASONS, len(responses))
        return ResponseRow(
            prompt=prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in messages),
            messages=messages,
            responses=responses,
            tokens=[value for value in tokens if isinstance(value, int)],
            truncated=[reason == "length" for reason in reasons],
            source=str(fields["data_source"]) if "data_source" in fields else "data",
            columns=finder.other_columns(fields, exclude=_NOT_FOR_REWARDS),
            of_conversations=_conversation_columns(row, len(responses)),
        )

    rows, report = use_rows(path, path, convert, on_bad_row)
    print(report)
    return rows


def _list_of(row: Row, name: str, count: int) -> list[Any]:
    """Return a column that is a list with one value per response, else an empty list."""
    values = row.get(name)
    return values if isinstance(values, list) and len(values) == count else []


def _conversation_columns(row: Row, count: int) -> dict[str, list[Any]]:
    """Return the columns of conversations of a row, by the argument of reward functions.

    Raises:
        BadRow: a reward of the environment is neither a number nor null.
    """
    columns = {name: _list_of(row, column, count) for name, column in OF_CONVERSATIONS.items()}
    for value in columns["environment_rewards"]:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadRow(f"{ENVIRONMENT_REWARDS!r} has {value!r}, expected numbers and null", "rewards not numbers")
    return {name: values for name, values in columns.items() if values}


def _check_rewards(rewards: Sequence[RewardFunction], columns: Sequence[str], rows: Sequence[ResponseRow]) -> None:
    """Validate that the functions can score the rows, and that no source has the name of the total.

    Raises:
        UsageError: a function needs a column that is missing, there is no reward, a function has the name
            ``environment``, or a source the name ``all``.
    """
    of_conversations = _common_columns(rows)
    if not rewards and ENVIRONMENT_REWARDS not in of_conversations:
        raise UsageError(f"set --reward, because the file has no column {ENVIRONMENT_REWARDS!r}")
    if ENVIRONMENT_REWARDS in of_conversations and ENVIRONMENT in [reward.label for reward in rewards]:
        raise UsageError(
            f"a reward function has the name {ENVIRONMENT!r}, which is that of the rewards in the column "
            f"{ENVIRONMENT_REWARDS!r}: rename the function"
        )
    sources = {row.source for row in rows}
    if len(sources) > 1 and ALL in sources:
        raise UsageError(f"a data_source is called {ALL!r}, the name of the statistics over all sources: rename it")
    check_rewards(rewards, columns, of_conversations)
    for reward in rewards:
        if "completion_ids" in reward.required:
            raise UsageError(f"reward function {reward.label!r} needs 'completion_ids', which the file does not have")


def score_rows(
    rows: Sequence[ResponseRow], rewards: Sequence[RewardFunction], columns: Sequence[str], extract: Extract | None
) -> list[ScoredResponses]:
    """Compute the rewards of every response.

    Args:
        rows: rows with the responses.
        rewards: reward functions.
        columns: columns of all rows; missing values become None.
        extract: function that returns the answers of responses; None extracts no answers.

    Raises:
        RuntimeError: a function failed.
    """
    row_of_response = [row for row in rows for _ in row.responses]
    offered: dict[str, list[Any]] = {
        "prompts": [row.prompt for row in row_of_response],
        "completions": [text for row in rows for text in row.responses],
        "finished": [not cut for row in rows for cut in (row.truncated or [False] * len(row.responses))],
        "messages": [row.messages for row in row_of_response] if any(row.messages for row in rows) else [],
        **{name: [value for row in rows for value in row.of_conversations[name]] for name in _common_columns(rows)},
    }
    offered |= {name: [row.columns.get(name) for row in row_of_response] for name in columns}
    values = {reward.label: iter(compute_reward(reward, **offered).tolist()) for reward in rewards}
    if ENVIRONMENT_REWARDS in offered:
        numbers = [math.nan if value is None else float(value) for value in offered[ENVIRONMENT_REWARDS]]
        values = {ENVIRONMENT: iter(numbers), **values}
    return [
        ScoredResponses(
            source=row.source,
            rewards={name: [next(of_reward) for _ in row.responses] for name, of_reward in values.items()},
            answers=[] if extract is None else extract_answers(extract, row.responses),
            tokens=row.tokens,
            truncated=row.truncated,
            characters=[len(text) for text in row.responses],
        )
        for row in rows
    ]


def _common_columns(rows: Sequence[ResponseRow]) -> list[str]:
    """Return the columns of conversations that every row contains."""
    return [name for name in OF_CONVERSATIONS if all(name in row.of_conversations for row in rows)]


def extract_answers(extract: Extract, responses: list[str]) -> list[Hashable]:
    """Return the answers of the responses to one prompt.

    Raises:
        RunError: the function raised an error, or did not return one hashable answer per response.
    """
    try:
        answers = list(extract(responses))
    except Exception as error:  # any error of a user's function
        raise RunError(f"--answer raised {type(error).__name__}: {error}") from error
    if len(answers) != len(responses):
        raise RunError(f"--answer returned {len(answers)} answers to {len(responses)} responses, expected one for each")
    unhashable = [answer for answer in answers if not isinstance(answer, Hashable)]
    if unhashable:
        raise RunError(f"--answer returned a {type(unhashable[0]).__name__}, expected text or numbers")
    return answers


def statistics_by_source(scored: Sequence[ScoredResponses], correct_at: float) -> dict[str, Any]:
    """Compute the statistics of each source, and the statistics over all sources if there are several."""
    correct_at = torch.tensor(correct_at, dtype=torch.float32).item()  # like rewards, which are float32
    sources = dict.fromkeys(row.source for row in scored)
    result = {name: statistics([row for row in scored if row.source == name], correct_at) for name in sources}
    return result if len(sources) == 1 else {**result, ALL: statistics(scored, correct_at)}


def table(report: dict[str, Any]) -> Table:
    """Render a report as a table with one row for each source and reward."""
    entries = [
        (source, name, total, values)
        for source, total in report["sources"].items()
        for name, values in total["rewards"].items()
    ]
    draws = dict.fromkeys(key for *_, values in entries for key in values if "@" in key)
    left_out = ["left out"] if any(values["not_applicable"] for *_, values in entries) else []
    result = Table(title=report["file"])
    columns = ("source", "reward", "prompts", "responses", *left_out, "mean", "95 % interval", *draws, "tokens", "cut")
    for column in columns:
        result.add_column(column, justify="left" if column in ("source", "reward") else "right")
    for source, name, total, values in entries:
        cells = [source, name, str(total["prompts"]), str(total["responses"])]
        cells += [str(values["not_applicable"]) for _ in left_out]
        cells += [_number(values["mean"]), f"{_number(values.get('low'))} to {_number(values.get('high'))}"]
        cells += [_number(values[key]["mean"]) if key in values else "" for key in draws]
        cells += [_number(total.get("response_tokens_mean")), _number(total.get("truncated_fraction"))]
        result.add_row(*cells)
    return result


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
