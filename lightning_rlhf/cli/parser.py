"""Errors of the command line in one sentence."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.other_names import ENGINES, called_here
from lightning_rlhf.strategies import ranks

_KEY = re.compile(r'^-?\s*Parser key "(.+)":\s*(.*)$')
_CLASS = re.compile(r"^-?\s*Problem with given class_path '(.+)':$")
_UNKNOWN = re.compile(
    r"(?:Group '(?P<group>.+)' does not accept option|does not accept option|Option) '(?P<name>[^']+)'"
)
_NO_CLASS = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
_CALLABLE = re.compile(r"^Type .+ expects a function or a callable class: ")
_NO_PATH = re.compile(r"^Expected a dot import path string: (.*)$")
_NOT_EITHER = re.compile(r"^(?:Expected a dot import path string: (.*)|Not a valid subclass of .*)$")
_WRONG_TYPE = re.compile(r"^Expected a (.+?)\. Got value: (.*)$")
_ALTERNATIVE = re.compile(r"^Expected a (<class '.+'>|typing\.Literal\[.+\])$")
_VALUE = re.compile(r"^Given value: (.*)$")
_NO_NEWS = re.compile(r"^(Does not validate|Subtypes:|Errors:|Given value|Expected a path but|Not of type Path)")
_YAML = re.compile(r"^Problems parsing config: (?P<what>.+)", re.DOTALL)
_PLACE = re.compile(r"\s*in .*, (line \d+, column \d+)")
_REQUIRED = re.compile(r"^the following arguments are required: fit\.(\w+)$")
_NO_KEYS = re.compile(r"^Unexpected config: ?(.*)")
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: (--[\w.-]+)")
_SECTIONS = ("model", "data", "trainer", "seed_everything", "ckpt_path")


class FriendlyParser(LightningArgumentParser):
    """Says what is wrong, suggests what was meant, and leaves out the usage page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with 2; parsers inside the parser raise, so that alternatives are tried."""
        if not self.exit_on_error:
            super().error(message, ex)
        if is_first_here():
            print(f"lightning-rlhf: {explain(message)}", file=sys.stderr)
        sys.exit(2)


def is_first_here() -> bool:
    """Return whether this process reports a mistake in the configuration, which every process of a machine finds.

    Once the processes have joined, the one that fails first reports.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return local_rank == "0" or ranks.is_distributed()


def explain(message: str) -> str:
    """What a message of jsonargparse comes down to.

    Args:
        message: a tree of what was tried and why each did not fit.

    Returns:
        Where, and the first reason that says something; with what was meant, where a name is nearly right.
    """
    if found := _YAML.match(message):
        lines = found["what"].strip().splitlines()  # where it began to read, what it found, and where that stands
        said = [line for line in lines if line and not line.startswith(" ")]
        places = _PLACE.findall(found["what"])
        where = f", {places[-1]}: indentation, or a bracket or quote that is not closed?" if places else ""
        return f"the configuration is not valid YAML: {said[1] if len(said) > 1 else said[0]}{where}"
    if found := _REQUIRED.match(message):
        return f"the configuration has no {found[1]!r}: give its class_path and init_args"
    if found := _NO_KEYS.match(message):
        return f"a configuration consists of keys such as 'model:' and 'trainer:', got {found[1]!r}"
    if found := _UNRECOGNIZED.match(message):
        section, _, name = found[1].removeprefix("--").rpartition(".")
        known = _known_names("", None, section) if section in ("", "trainer") else []
        if here := called_here(name):
            return f"unknown option {found[1]!r}{here}"
        return f"unknown option {found[1]!r}{_meant(name, [*known, 'config'])}"
    keys: list[str] = []
    class_path, alternatives, value = "", list[str](), ""
    for line in (_CALLABLE.sub("", line.strip().removeprefix("- ")) for line in message.splitlines()):
        if found := _KEY.match(line):
            keys.append(found[1])
            line = found[2].strip()
        elif found := _CLASS.match(line):
            class_path = found[1]
            continue
        if found := _ALTERNATIVE.match(line):
            alternatives.append(_kind(found[1]))
        elif found := _VALUE.match(line):
            value = value or found[1]
        elif alternatives and (found := _NOT_EITHER.match(line)):
            value = value or found[1]
            break  # what follows tells how a class is given, where a plain value is asked for
        elif line and not _NO_NEWS.match(line):
            return _located(_reason(line, class_path), keys, class_path)
    wanted = " or ".join(name for name in alternatives if name != "NoneType")
    return _located(f"expected {wanted}, got {value!r}", keys, class_path) if wanted else message


def _located(reason: str, keys: list[str], class_path: str) -> str:
    """The reason behind the key and the class it is about."""
    where = ".".join(dict.fromkeys(keys))
    owner = f"({class_path.rpartition('.')[2]})" if class_path else ""
    return ": ".join(part for part in (f"{where} {owner}".strip(), reason) if part)


def _kind(name: str) -> str:
    """A type as people say it."""
    if found := re.match(r"<class '(?:.*\.)?(\w+)'>$", name):
        return found[1]
    return f"one of {found[1]}" if (found := re.match(r"typing\.Literal\[(.+)\]$", name)) else name


def _reason(line: str, class_path: str) -> str:
    if found := _NO_CLASS.search(line):
        return f"{found[2]!r} was not found in {found[1]}{_meant(found[2], dir(import_module(found[1])))}"
    if found := _NO_PATH.match(line):
        engine = f"; write {ENGINES[found[1]]}" if found[1] in ENGINES else ""
        return f"expected the dotted path of a class, got {found[1]!r}{engine}"
    if found := _WRONG_TYPE.search(line):
        return f"expected {_kind(found[1])}, got {found[2]!r}"
    if found := _UNKNOWN.search(line):
        section, _, name = found["name"].rpartition(".")
        name = name or found["name"]
        first = found["name"].partition(".")[0]
        if first != "init_args" and difflib.get_close_matches(first, ["init_args"], cutoff=0.8):
            return f"unknown key {first!r}; did you mean 'init_args'?"
        if section in ("", "trainer") or class_path:
            if (here := called_here(name)) and name not in _known_names(class_path, found["group"], section):
                return f"unknown option {found['name']!r}{here}"
            return f"unknown option {found['name']!r}{_meant(name, _known_names(class_path, found['group'], section))}"
        return f"unknown option {found['name']!r}{_meant(section.partition('.')[0], _SECTIONS)}"
    return line


def _known_names(class_path: str, group: str | None, section: str) -> list[str]:
    """Names that could have been meant: parameters of a class, of one of its groups, or of the Trainer."""
    if not class_path:
        return list(inspect.signature(Trainer).parameters) if section == "trainer" else list(_SECTIONS)
    module, _, name = class_path.rpartition(".")
    parameters = _parameters(getattr(import_module(module), name))
    if group is None:
        return list(parameters)
    default = parameters[group].default if group in parameters else None
    return list(inspect.signature(type(default)).parameters) if is_dataclass(default) else []


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Constructor parameters, those passed on to base classes included."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            found = {**inspect.signature(vars(base)["__init__"]).parameters, **found}
    return {name: parameter for name, parameter in found.items() if name not in ("self", "args", "kwargs")}


def _meant(name: str, known: list[str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
