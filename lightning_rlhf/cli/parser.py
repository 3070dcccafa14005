"""Parser of configurations that reports an error in one line, with the nearest known name."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.early import suggestion
from lightning_rlhf.cli.errors import is_about_a_printed_one
from lightning_rlhf.cli.signatures import find_class
from lightning_rlhf.launch_environment import is_first_process
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

    def parse_object(self, obj: Any, *rest: Any, **kwargs: Any) -> Any:
        """Parse the options of a class: a class that one of them names keeps its defaults.

        jsonargparse would keep the values that the option's default object has under the same names.
        """
        defaults = self._defaults_of_classes
        options = obj.clone() if isinstance(obj, Namespace) else dict(obj)
        for name in defaults:
            if name in options:
                options[name] = self._with_class(defaults[name], options[name])
        for name, kind in self._dataclasses.items():
            if name in options:
                options[name] = _with_own_values(options[name], kind)
        actions = [action for action in self._actions if action.dest in defaults]
        current = [action.default for action in actions]  # of an outer object of the same class
        for action in actions:
            action.default = None if action.dest in options else defaults[action.dest]
        try:
            return super().parse_object(options, *rest, **kwargs)
        finally:
            for action, default in zip(actions, current, strict=True):
                action.default = default

    @functools.cached_property
    def _defaults_of_classes(self) -> dict[str, Any]:
        """Default objects of the options that are classes, and default lists."""
        return {
            action.dest: action.default
            for action in self._actions
            if isinstance(action.default, list | tuple) or _is_class(action.default)
        }

    @functools.cached_property
    def _dataclasses(self) -> dict[str, type]:
        """Options that are a dataclass without subclasses: their fields are options of this parser, too."""
        kinds = {action.dest: getattr(action, "basetype", None) for action in self._actions}
        return {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind) and isinstance(kind, type)}

    def _with_class(self, default: Any, value: Any) -> Any:
        """Return options without a class with the class of the default object, and with its other options."""
        if not _is_class(default) or not isinstance(value, Mapping | Namespace) or _is_class(value):
            return value
        changed = dict(value.get("init_args", value))
        options = dict(default.get("init_args") or {})
        for name, entry in changed.items():
            options[name] = self._with_class(options.get(name), entry)
        return Namespace(class_path=default["class_path"], init_args=Namespace(options))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with 2; a nested parser raises, so that jsonargparse tries the alternatives."""
        if not self.exit_on_error:
            super().error(message, ex)
        text = condense(message)
        if absent := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
            text += suggestion(absent[2], dir(sys.modules[absent[1]]))
        named = re.findall(r"class_path[ =]'([\w.]+)'", text)
        if named and (unknown := re.search(r"Option '([\w.]+)' is not accepted", text)):
            kind = find_class(named[-1])
            text = f"{named[-1]}: unknown option {unknown[1]!r}{suggestion(unknown[1], kind.options if kind else ())}"
        elif named and (missing := re.search(r"following arguments are required: (.+)", text)):
            text = f"{named[-1]}: set {missing[1]}, which it needs"
        if reports_errors() and not is_about_a_printed_one(text):
            print(f"lightning-rlhf: {text}", file=sys.stderr)
        sys.exit(2)


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping | Namespace) and "class_path" in value


def _with_own_values(value: Any, kind: type) -> Any:
    """Return a value that names the class of a dataclass with all of its fields; others stay as they are."""
    if isinstance(value, str) and value.rpartition(".")[2] == kind.__name__:
        value = {"class_path": value}
    if not _is_class(value):
        return value
    defaults = {
        field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    }
    options = value.get("init_args") or {}
    return {"class_path": value["class_path"], "init_args": {**defaults, **dict(options)}}


def reports_errors() -> bool:
    """Return whether this process prints errors in the configuration, which every process of a machine detects.

    After the process group is initialized, only the first process that fails detects an error, so any process prints.
    """
    return is_first_process() or ranks.is_distributed()


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
