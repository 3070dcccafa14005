"""``lightning-rlhf evaluate``: scores of a file of responses, for each source of data."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from lightning_rlhf.cli.arguments import command_parser
from lightning_rlhf.cli.generate import PROMPT_TOKENS, REASONS, RESPONSES, TOKENS, pairs
from lightning_rlhf.cli.main import is_for_users, quiet
from lightning_rlhf.cli.responses_file import writing
from lightning_rlhf.cli.scores import Judged, figures
from lightning_rlhf.data.chat import messages_of
from lightning_rlhf.data.columns import PROMPT, REWARD_FIELDS, Columns
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, use_rows
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction, check_rewards
from lightning_rlhf.rewards.loading import load_function

ALL = "all"
_EPILOG = """The file is what generate writes, or verl: each row has a list of responses, and beside it what the reward
functions read (ground_truth, reward_model.ground_truth, answer, data_source, ...). An interval is that of 95 %.

  lightning-rlhf evaluate answers.jsonl --reward lightning_rlhf.rewards.rules:gsm8k_strict --json report.json
  lightning-rlhf evaluate answers.jsonl --reward my_rewards.py:right --answer my_rewards.py:last_number
"""
_BESIDE = ("prompt", "messages", "responses", RESPONSES, TOKENS, REASONS, PROMPT_TOKENS)


class Responded(NamedTuple):
    """A prompt with its responses.

    Args:
        prompt: as text.
        messages: it was made of, if any.
        responses: at least one.
        tokens: of each, where the row tells.
        truncated: each, where the row tells.
        source: of the data.
        columns: for reward functions.
    """

    prompt: str
    messages: list[Any]
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]
    source: str
    columns: dict[str, Any]


def run(arguments: list[str]) -> int:
    """Judge responses and print what came of it.

    Args:
        arguments: behind ``evaluate``.

    Returns:
        Exit code: 0; 2 for a mistake found before anything was judged; 1 where a reward function failed.
    """
    parser = command_parser("evaluate", "Scores of a file of responses, for each source of data.", _EPILOG)
    parser.add_argument("file", help="rows with responses: .jsonl, .json, .csv, .parquet, ...")
    parser.add_argument("--reward", action="append", required=True, metavar="FUNCTION", help="may be given repeatedly")
    parser.add_argument("--answer", metavar="FUNCTION", help="from responses to the answers they give, for maj@k")
    parser.add_argument("--correct-at", type=float, default=1.0, help="least reward that is correct (default: 1)")
    parser.add_argument("--columns", nargs="+", default=[], metavar="OURS=YOURS", help="as ground_truth=target")
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default: error)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    given = parser.parse_args(arguments)
    quiet()
    code = 2
    try:
        if math.isnan(given.correct_at):
            raise ValueError("--correct-at must be a number, got nan")
        rewards = [RewardFunction(reference) for reference in given.reward]
        extract = load_function(given.answer) if given.answer else None
        rows = read(given.file, pairs(given.columns), given.on_bad_row)
        names = sorted({name for row in rows for name in row.columns})
        check(rewards, names, {row.source for row in rows})
        if given.json is not None:
            with writing(given.json, "choose another --json"):
                given.json.parent.mkdir(parents=True, exist_ok=True)
        code = 1
        judged = judge(rows, rewards, names, extract)
        report = {"file": given.file, "correct_at": given.correct_at, "sources": by_source(judged, given.correct_at)}
        # No line is cut where nobody looks on, and names are shown as they are.
        Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(table(report))
        if given.json is not None:
            with writing(given.json, "the table is above"):
                given.json.write_text(json.dumps(report, indent=2) + "\n")
    except Exception as error:
        if not is_for_users(error):
            raise
        if error.__cause__ is not None and code == 1:
            traceback.print_exception(error.__cause__)
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return code
    return 0


def read(path: str, columns: dict[str, str], on_bad_row: OnBadRow) -> list[Responded]:
    """Rows with responses.

    Args:
        path: of anything that data is read from.
        columns: our name to the file's.
        on_bad_row: what becomes of rows that cannot be used.

    Raises:
        ValueError: rows without responses, and they are not to be skipped.
    """
    found = Columns(columns, ((("responses", RESPONSES),), PROMPT, *REWARD_FIELDS))

    def convert(row: Row) -> Responded:
        fields = found.find(row)
        responses = fields["responses"]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
            raise BadRow("the responses are neither a text nor a list of texts", "no responses")
        name = next((name for name in ("messages", "prompt") if name in fields), None)
        prompt = "" if name is None else fields[name] or ""
        messages = [] if isinstance(prompt, str) else messages_of(prompt, "prompt")
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in messages)
        tokens, reasons = (_of_each(row, key, len(responses)) for key in (TOKENS, REASONS))
        return Responded(
            text,
            messages,
            responses,
            [value for value in tokens if isinstance(value, int)],
            [reason == "length" for reason in reasons],
            str(fields["data_source"]) if "data_source" in fields else "data",
            found.other_columns(fields, exclude=_BESIDE),
        )

    rows, report = use_rows(path, path, convert, on_bad_row)
    print(report)
    return rows


def _of_each(row: Row, name: str, count: int) -> list[Any]:
    values = row.get(name)
    return values if isinstance(values, list) and len(values) == count else []


def check(rewards: Sequence[RewardFunction], columns: Sequence[str], sources: Collection[str] = ()) -> None:
    """Refuse functions that cannot judge these rows, and sources that could not be told from all of them.

    Raises:
        ValueError: a function needs what is not there, or a source has the name of the whole.
    """
    if len(sources) > 1 and ALL in sources:
        raise ValueError(f"a data_source is called {ALL!r}, as the figures of all of them are: rename it")
    check_rewards(rewards, columns)
    for reward in rewards:
        if "completion_ids" in reward.required:
            raise ValueError(f"reward function {reward.label!r} needs 'completion_ids', which a file of texts has not")


def judge(
    rows: Sequence[Responded],
    rewards: Sequence[RewardFunction],
    columns: Sequence[str],
    extract: Callable[[list[str]], Sequence[Hashable]] | None,
) -> list[Judged]:
    """What reward functions say of every response.

    Args:
        rows: with the responses.
        rewards: the functions.
        columns: of all rows; one that lacks some has None there.
        extract: from responses to the answers they give; None where nobody asks.

    Raises:
        RuntimeError: a function misbehaved.
    """
    each = [row for row in rows for _ in row.responses]
    texts = [text for row in rows for text in row.responses]
    offered: dict[str, list[Any]] = {
        "prompts": [row.prompt for row in each],
        "completions": texts,
        "finished": [not cut for row in rows for cut in (row.truncated or [False] * len(row.responses))],
        "messages": [row.messages for row in each] if any(row.messages for row in rows) else [],
        **{name: [row.columns.get(name) for row in each] for name in columns},
    }
    values = {reward.label: iter(compute_reward(reward, **offered).tolist()) for reward in rewards}
    judged = []
    for row in rows:
        answers = [] if extract is None else answers_of(extract, row.responses)
        said = {name: [next(those) for _ in row.responses] for name, those in values.items()}
        lengths = [len(text) for text in row.responses]
        judged.append(Judged(row.source, said, answers, row.tokens, row.truncated, lengths))
    return judged


def answers_of(extract: Callable[[list[str]], Sequence[Hashable]], responses: list[str]) -> list[Hashable]:
    """The answers that the responses to one prompt give.

    Raises:
        RuntimeError: the function raised, or gave something else than one answer to each that can be counted.
    """
    try:
        answers = list(extract(responses))
    except Exception as error:  # it is a user's
        raise RuntimeError(f"--answer raised {type(error).__name__}: {error}") from error
    if len(answers) != len(responses):
        raise RuntimeError(f"--answer gave {len(answers)} answers to {len(responses)} responses")
    if odd := [answer for answer in answers if not isinstance(answer, Hashable)]:
        raise RuntimeError(f"--answer gave a {type(odd[0]).__name__}, which cannot be counted: give text or a number")
    return answers


def by_source(judged: Sequence[Judged], correct_at: float) -> dict[str, Any]:
    """Figures of each source, and of all where there are several."""
    correct_at = torch.tensor(correct_at, dtype=torch.float32).item()  # as rewards are: 0.9 is less than its float64
    sources = list(dict.fromkeys(row.source for row in judged))
    found = {name: figures([row for row in judged if row.source == name], correct_at) for name in sources}
    return found if len(sources) == 1 else {**found, ALL: figures(judged, correct_at)}


def table(report: dict[str, Any]) -> Table:
    """The report for eyes."""
    entries = [
        (source, name, found, values)
        for source, found in report["sources"].items()
        for name, values in found["rewards"].items()
    ]
    draws = dict.fromkeys(key for *_, values in entries for key in values if "@" in key)
    left = ["left out"] if any(values["not_applicable"] for *_, values in entries) else []
    shown = Table(title=report["file"])
    for column in ("source", "reward", "prompts", "responses", *left, "mean", "95 % interval", *draws, "tokens", "cut"):
        shown.add_column(column, justify="left" if column in ("source", "reward") else "right")
    for source, name, found, values in entries:
        cells = [_number(values[key]["mean"]) if key in values else "" for key in draws]
        low, high = (_number(values.get(bound)) for bound in ("low", "high"))
        tokens, cut = (_number(found.get(key)) for key in ("response_tokens_mean", "truncated_fraction"))
        counts = [str(found["prompts"]), str(found["responses"]), *(str(values["not_applicable"]) for _ in left)]
        shown.add_row(source, name, *counts, _number(values["mean"]), f"{low} to {high}", *cells, tokens, cut)
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
