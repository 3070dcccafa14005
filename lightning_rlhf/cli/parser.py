"""Parser of configurations that reports an error in one line, with the nearest known name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.config_mistakes import hint
from lightning_rlhf.strategies import ranks

# Lines of jsonargparse's trees of alternatives that contain no reason.
_STRUCTURE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value type",
    "Expected a path but",
    "Not of type Path",
    "Expected a <class 'NoneType'>",
)
_MOST_CHARACTERS = 100  # longest value in a message


class ConfigParser(LightningArgumentParser):
    """Parser of a run's configuration; errors are one line without the usage page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._arguments: Sequence[str] = ()

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse arguments, and keep them for messages about unknown names."""
        self._arguments = sys.argv[1:] if args is None else args
        return super().parse_args(args, *rest, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with 2; a nested parser raises, so that jsonargparse tries the alternatives."""
        if not self.exit_on_error:
            super().error(message, ex)
        if reports_errors():
            print(f"lightning-rlhf: {self._unknown_option() or condense(message)}", file=sys.stderr)
        sys.exit(2)

    def _unknown_option(self) -> str | None:
        """Describe the first option of the command line that is not a section; None if all are known."""
        subparsers = [
            parser
            for action in self._actions
            if isinstance(action.choices, Mapping)
            for parser in action.choices.values()
        ]
        known = {
            option.removeprefix("--").partition(".")[0]
            for parser in (self, *subparsers)
            for option in parser._option_string_actions
        }
        for argument in self._arguments:
            name = argument.removeprefix("--").partition("=")[0].partition(".")[0]
            if argument.startswith("--") and name not in known:
                return f"unknown option {name!r}{hint(name, known)}"
        return None


def reports_errors() -> bool:
    """Return whether this process prints errors in the configuration, which every process of a machine detects.

    After the process group is initialized, only the first process that fails detects an error, so any process prints.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return local_rank == "0" or ranks.is_distributed()


def condense(message: str) -> str:
    """Return a message of jsonargparse in one line: the keys, and the first reason of its tree of alternatives.

    Args:
        message: message, possibly of many lines.
    """
    parts: list[str] = []
    for line in (line.strip().removeprefix("- ") for line in message.splitlines()):
        if line.startswith("Not a valid subclass") and parts:
            break
        if not line or line.startswith(_STRUCTURE):
            continue
        is_value = line.startswith("Given value: ")
        if is_value and len(line) > _MOST_CHARACTERS:
            break
        is_alternative = bool(parts) and "Expected a" in parts[-1] and line.startswith("Expected a")
        parts.append(f"or {line}" if is_alternative else line)
        if is_value or "Got value: " in line:
            break
    return " ".join(parts) or message
