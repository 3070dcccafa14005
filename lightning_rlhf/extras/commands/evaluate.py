"""``lightning-rlhf evaluate``: score a file of responses, for each source of data."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_rlhf.calls.references import load_function
from lightning_rlhf.cli.config_files import add_import_folders
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError, for_terminal
from lightning_rlhf.extras.commands import row_images
from lightning_rlhf.extras.commands.exit_codes import failure_code_1
from lightning_rlhf.extras.commands.kept_responses import check_target, write_kept
from lightning_rlhf.extras.commands.options import ROLES_HELP, command_parser, parse_columns, parse_roles, table_width
from lightning_rlhf.extras.commands.response_rows import ALL, NO_SOURCE, ResponseRow, common_columns, read_rows
from lightning_rlhf.extras.commands.responses_file import ENVIRONMENT_REWARDS, write_errors
from lightning_rlhf.images import ImageSettings
from lightning_rlhf.rewards.function import ENVIRONMENT, OPENRLHF, RewardFunction, check_rewards

_EPILOG = """A file was written by generate or verl: each row has a list of responses, and the columns of the reward
functions (ground_truth, reward_model.ground_truth, answer, data_source, ...). Intervals are 95 % intervals. Of several
files for the same rows, such as before and after training, the differences from the first are printed, too.

  lightning-rlhf evaluate answers.jsonl --reward lightning_rlhf.rewards.rules:gsm8k_strict --json report.json
  lightning-rlhf evaluate before.jsonl after.jsonl --reward my_rewards.py:right
  lightning-rlhf evaluate answers.jsonl --reward my_rewards.py:right --answer my_rewards.py:last_number
  lightning-rlhf evaluate answers.jsonl --reward my_rewards.py:right --keep above 0.5 --to rows.jsonl

--keep writes rows for training: best is the best response to each prompt, above R all different ones with a reward
above R, pairs the best and the worst as chosen and rejected. Several rewards are summed.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("evaluate", "Score a file of responses, for each source of data.", _EPILOG)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="rows with responses: .jsonl, .json, .csv, .parquet, ..."
    )
    parser.add_argument(
        "--reward", action="append", default=[], metavar="FUNCTION", help="file.py:name or module:name; can be repeated"
    )
    parser.add_argument(
        "--messages", action="store_true", help="pass prompts and responses as chat messages, as TRL's functions expect"
    )
    parser.add_argument("--answer", metavar="FUNCTION", help="extracts answers from responses, for maj@k")
    parser.add_argument(
        "--correct-at", type=float, metavar="REWARD", default=1.0, help="reward of a correct response (default: 1)"
    )
    parser.add_argument("--columns", nargs="+", default=[], metavar="FIELD=COLUMN", help="such as ground_truth=target")
    parser.add_argument("--roles", nargs="+", default=[], metavar="NAME=ROLE", help=ROLES_HELP)
    parser.add_argument("--images", metavar="DIR", help=row_images.HELP)
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default: error)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the whole report")
    parser.add_argument("--keep", nargs="+", metavar="CHOICE", help="responses to write to --to: best, above R, pairs")
    parser.add_argument("--to", type=Path, metavar="FILE.jsonl", help="rows for SFT or, of pairs, for DPO")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Score responses and print a table.

    Returns:
        Exit code: 0; 2 for a mistake found before the responses were scored; 1 if a reward function failed.
    """
    options = make_parser().parse_args(arguments)
    add_import_folders()
    _check_options(options)
    keep = check_target(options.to, options.keep, len(options.files))
    rewards = [RewardFunction(reference, messages=options.messages) for reference in options.reward]
    extract = load_function(options.answer) if options.answer else None
    columns, roles = parse_columns(options.columns), parse_roles(options.roles)
    images = ImageSettings(folder=options.images) if any(map(_reads_images, rewards)) else None
    files = {name: read_rows(name, columns, options.on_bad_row, images, roles) for name in options.files}
    for rows in files.values():
        _check_rewards(rewards, rows)
    if options.json is not None:
        with write_errors(options.json, "choose another --json"):
            options.json.parent.mkdir(parents=True, exist_ok=True)

    # These import torch, which takes seconds.
    from lightning_rlhf.cli.screen import configure_messages
    from lightning_rlhf.extras.commands.scores import difference_by_source, score_rows, statistics_by_source

    configure_messages()
    with failure_code_1(shows_cause=True):
        scored = {name: score_rows(rows, rewards, extract) for name, rows in files.items()}
        reports = [
            {
                "file": name,
                "correct_at": options.correct_at,
                "sources": statistics_by_source(rows, options.correct_at),
            }
            for name, rows in scored.items()
        ]
        first, *others = scored
        differences = [
            {"file": name, "from": first, **difference_by_source(scored[first], scored[name])}
            for name in others
            if are_of_the_same_rows(files[first], files[name])
        ]
        # Names are printed without markup.
        screen = Console(width=table_width(), markup=False, emoji=False, highlight=False)
        screen.print(table(reports))
        for line in _lines(first, others, differences, len(scored[first])):
            screen.print(for_terminal(line))
        if keep is not None:
            (name,) = files
            screen.print(write_kept(options.to, keep, files[name], scored[name]))
        if options.json is not None:
            report = {"files": reports, "differences": differences} if others else reports[0]
            with write_errors(options.json, "the table is above"):
                options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _reads_images(reward: RewardFunction) -> bool:
    """Return whether a function receives the images of prompts, as ``images``, in messages or with all columns."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in reward.parameters)
    return reward.messages or takes_all or "images" in reward.columns


def _check_options(options: argparse.Namespace) -> None:
    if math.isnan(options.correct_at):
        raise UsageError("--correct-at must be a number, got nan")
    repeated = next((name for i, name in enumerate(options.files) if name in options.files[:i]), None)
    if repeated is not None:
        raise UsageError(f"{repeated} was given twice: name each file once")


def are_of_the_same_rows(first: Sequence[ResponseRow], second: Sequence[ResponseRow]) -> bool:
    """Return whether two files have responses to the same rows: equal prompts, or else equal other columns."""
    if len(first) != len(second):
        return False
    pairs = list(zip(first, second, strict=True))
    if all(a.prompt == b.prompt and a.messages == b.messages for a, b in pairs):
        return True
    return all(a.columns and a.columns == b.columns for a, b in pairs)


def _lines(first: str, others: Sequence[str], differences: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Return lines about the differences of the other files from the first."""
    lines = []
    for name in others:
        difference = next((each for each in differences if each["file"] == name), None)
        if difference is None:
            lines.append(f"{name} has other rows than {first}, so that their rewards are not compared")
            continue
        lines.append(f"{name} less {first}, {count} rows, 95 % intervals in brackets:")
        lines += [f"  {reward}: {_change(values)}" for reward, values in difference["rewards"].items()]
        for source, rewards in difference["sources"].items():
            lines += [f"  {reward} of {source}: {_change(values)}" for reward, values in rewards.items()]
    return lines


def _change(values: dict[str, float | None]) -> str:
    """Return a mean difference with its interval as text."""
    if values["mean"] is None:
        return "no response of both files has this reward"
    interval = ""
    if values["low"] is not None:
        interval = f" ({values['low']:+.3f} to {values['high']:+.3f})"
    return f"{values['mean']:+.3f}{interval}"


def _check_rewards(rewards: Sequence[RewardFunction], rows: Sequence[ResponseRow]) -> None:
    """Validate that the functions can score the rows, and that no source has the name of the total.

    Raises:
        UsageError: a function needs a column that is missing, there is no reward, a function has the name
            ``environment``, or a source the name ``all``.
    """
    of_conversations = common_columns(rows)
    if not rewards and ENVIRONMENT_REWARDS not in of_conversations:
        raise UsageError(f"set --reward, because the file has no column {ENVIRONMENT_REWARDS!r}")
    if ENVIRONMENT_REWARDS in of_conversations and ENVIRONMENT in [reward.label for reward in rewards]:
        raise UsageError(
            f"a reward function has the name {ENVIRONMENT!r}, but so have the rewards in the column "
            f"{ENVIRONMENT_REWARDS!r}: rename the function"
        )
    sources = {row.source for row in rows}
    if len(sources) > 1 and ALL in sources:
        raise UsageError(f"a source is called {ALL!r}, the name of the statistics over all sources: rename it")
    columns = {name for row in rows for name in row.columns} | (
        {"images"} if any(row.images for row in rows) else set()
    )
    check_rewards(rewards, sorted(columns), of_conversations)
    for reward in rewards:
        needed = [*reward.required, *(["end_tokens"] if reward.convention is OPENRLHF else [])]  # of its queries
        for name in ("completion_ids", "end_tokens"):
            if name in needed and name not in of_conversations:
                raise UsageError(
                    f"reward function {reward.label!r} needs {name!r}, which the file does not have: write it by "
                    f"lightning-rlhf generate --model"
                )


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """Render reports of files as a table with one row for each file, source and reward."""
    entries = [
        (report["file"], source, name, total, values)
        for report in reports
        for source, total in report["sources"].items()
        for name, values in total["rewards"].items()
    ]
    # pass@1 of rewards of 0 and 1 is their mean.
    draws = dict.fromkeys(key for *_, values in entries for key in values if "@" in key)
    if all(values.get("pass@1", values)["mean"] == values["mean"] for *_, values in entries):
        draws.pop("pass@1", None)
    left_out = []
    if any(values["not_applicable"] for *_, values in entries):
        left_out = ["left out"]
    has_passes = any(key.startswith("pass@") for key in draws)
    if has_passes:
        correct = f"correct: a reward of at least {reports[0]['correct_at']:g} (--correct-at)"
    else:
        correct = None
    single = len(reports) == 1
    result = Table(title=reports[0]["file"] if single else None, caption=correct, caption_justify="left")
    source_column = []
    if {source for _, source, *_ in entries} != {NO_SOURCE}:
        source_column = ["source"]
    counts = ("prompts", "responses", *left_out)
    columns = (*source_column, "reward", *counts, "mean", "95 % interval", *draws, "tokens", "cut")
    for column in columns if single else ("file", *columns):
        result.add_column(column, justify="left" if column in ("file", "source", "reward") else "right")
    for file, source, name, total, values in entries:
        cells = [*([] if single else [file]), *(source for _ in source_column), name]
        cells += [str(total["prompts"]), str(total["responses"])]
        cells += [str(values["not_applicable"]) for _ in left_out]
        cells += [_number(values["mean"]), f"{_number(values.get('low'))} to {_number(values.get('high'))}"]
        cells += [_number(values[key]["mean"]) if key in values else "" for key in draws]
        cells += [_number(total.get("response_tokens_mean")), _number(total.get("truncated_fraction"))]
        result.add_row(*map(for_terminal, cells))
    return result


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}"
