"""Argument parsing of commands that need no configuration."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning_rlhf.data.messages import check_roles
from lightning_rlhf.expected_errors import ExpectedError, UsageError

ROLES_HELP = "such as teacher=assistant"
_HELP_COLUMN = 36  # options and their help in one line


def command_parser(name: str, description: str, epilog: str = "", arguments: str = "") -> argparse.ArgumentParser:
    """Return a parser that rejects abbreviated options and keeps the line breaks of its epilog.

    Args:
        name: name of the command.
        description: sentence that describes the command.
        epilog: text after the options.
        arguments: required arguments in the usage line of a command with many options; the others are ``[OPTION ...]``.
    """
    return argparse.ArgumentParser(
        f"lightning-rlhf {name}",
        usage=f"lightning-rlhf {name} {arguments} [OPTION ...]" if arguments else None,
        description=description,
        epilog=epilog,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=_HELP_COLUMN),
        allow_abbrev=False,
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``runs``: directories of runs, at least one."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory of a run (its default_root_dir), or one folder of runs",
    )


def parse_columns(pairs: list[str]) -> dict[str, str | None]:
    """Parse pairs of a field and a column; the column ``null`` leaves a field out.

    Raises:
        UsageError: a value is not a pair.
    """
    columns = _parse_pairs(pairs, "--columns needs field=column, for example prompt=question")
    return {field: None if column == "null" else column for field, column in columns.items()}


def parse_roles(pairs: list[str]) -> Mapping[str, str]:
    """Parse pairs of a role's name in the data and the role that it is.

    Raises:
        UsageError: a value is not a pair, or a role is not known.
    """
    return check_roles(_parse_pairs(pairs, "--roles needs name=role, for example teacher=assistant"))


@contextmanager
def options_of_commands() -> Iterator[None]:
    """Let messages about rows name the option ``--columns`` of the command, and not that of a configuration."""
    try:
        yield
    except ExpectedError as error:
        text = re.sub(r"set data\.init_args\.columns: \{([^{}]*)\}", _as_option, str(error))
        if text == str(error):
            raise
        raise UsageError(text) from error


def _as_option(match: re.Match[str]) -> str:
    pairs = (pair.partition(": ") for pair in match[1].split(", "))
    return f"set --columns {' '.join(f'{field}={column}' for field, _, column in pairs)}"


def _parse_pairs(pairs: list[str], needed: str) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"{needed}, got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def table_width() -> int | None:
    """Return the width of tables: None, that of the terminal, or one at which a log's lines are not folded."""
    if sys.stdout.isatty():
        return None
    return 200
