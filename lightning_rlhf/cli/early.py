"""The early check of a configuration, before libraries are imported that take seconds.

It ends a run only where no parser could go on: a file is missing or is not YAML, or an option has no value. Any other
mistake is printed, and the parser decides; an error that it then reports is printed only if it is about something else.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from lightning_rlhf.cli.commands import CHECK, COMMANDS
from lightning_rlhf.cli.config_files import add_import_folders, check_config_files, wants_help
from lightning_rlhf.cli.errors import in_one_message, printed
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.launch_environment import is_first_process

# A command without any of these options has no module: they set one, or end the command before it is needed.
_ENOUGH = {"--config", "--model", "--data", "--print_config", "--gpu"}
_checked: list[Sequence[str]] = []  # the command line that was checked before the parser asks for it


def check_early(arguments: Sequence[str], command: str, before: bool = False) -> None:
    """Print the mistakes in the configuration files and options of a run; once for a command line.

    Args:
        arguments: command line after the command's name.
        command: name of the command; empty if it is another one that reads the configuration of ``fit``.
        before: whether the parser comes later, which asks for the same check.

    Raises:
        UsageError: a file does not exist or is not YAML, an option has no value, or there is no configuration.
    """
    if list(arguments) in _checked and not before:
        _checked.clear()
        return
    printed.clear()
    _checked[:] = [list(arguments)] if before else []
    add_import_folders(arguments)
    check_config_files(arguments)
    if wants_help(arguments):
        return
    printed.update(import_module(CHECK).mistakes(arguments, command))
    if printed and is_first_process():
        print(f"lightning-rlhf: {in_one_message(list(printed))}", file=sys.stderr, flush=True)
    if command in COMMANDS and _ENOUGH.isdisjoint(each.partition("=")[0].partition(".")[0] for each in arguments):
        raise UsageError(f"{command} needs a configuration: add --config FILE")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message with the nearest of the known names; empty if none is near."""
    by_case = {match.lower(): match for match in known}
    near = [by_case[name.lower()]] if name.lower() in by_case else difflib.get_close_matches(name, by_case.values(), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    return suggestion(name, names) or f"; known: {', '.join(sorted(names))}"
