"""Parser of configurations that reports an error in one line, with the nearest known name."""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import pkgutil
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rlhf.cli.config_files import config_files, read_yaml
from lightning_rlhf.cli.option_names import ENGINES, OPTION_NAMES
from lightning_rlhf.cli.wrong_values import wrong_value
from lightning_rlhf.strategies import ranks

_SECTIONS = ("model", "data", "trainer", "seed_everything", "ckpt_path", "config")
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
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
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
            print(f"lightning-rlhf: {self._wrong_setting() or condense(message)}", file=sys.stderr)
        sys.exit(2)

    def _wrong_setting(self) -> str | None:
        """Describe the first unknown name, else the first value of a wrong type; None if there is neither."""
        subparsers = [
            parser
            for action in self._actions
            if isinstance(action.choices, Mapping)
            for parser in action.choices.values()
        ]
        options = [option for parser in (self, *subparsers) for option in parser._option_string_actions]
        sections = {option.removeprefix("--").partition(".")[0] for option in options}
        config: dict[str, Any] = {}
        for file in config_files(self._arguments):
            if file.is_file():
                config = _merge(config, read_yaml(file))
        settings = _settings_of(self._arguments)
        if _is_of_another_callback(settings, config):
            return (
                "on the command line, --trainer.callbacks.NAME is an option of the last callback in the configuration: "
                "set options of other callbacks in its file"
            )
        config = _merge(config, settings)
        return next(itertools.chain(unknown_names(config, [*sections, *_SECTIONS]), wrong_values(config)), None)


def _is_of_another_callback(settings: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether the command line has an option of callbacks that the last one of a configuration does not have."""
    options = settings.get("trainer", {}).get("callbacks")
    callbacks = config.get("trainer", {}).get("callbacks")
    if not isinstance(options, dict) or not isinstance(callbacks, list) or not callbacks:
        return False
    entry = callbacks[-1]
    last = next(_classes_in({"class_path": entry} if isinstance(entry, str) else entry, "", None), None)
    names = {**options, **options.get("init_args", {})}.keys() - set(_CLASS_KEYS)
    return last is not None and not names <= last.known.keys()


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


def _settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line as a nested dictionary, without those for files and help."""
    settings: dict[str, Any] = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if not argument.startswith("--"):
            continue
        name, has_value, value = argument.removeprefix("--").partition("=")
        *sections, last = name.removesuffix("+").split(".")
        if last == "help" or name == "config":
            continue
        inner = settings
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[last] = value if has_value else following
    return settings


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; the second overrides values, and replaces a dictionary of another class."""
    merged = dict(first) if second.get("class_path") in (None, first.get("class_path")) else {}
    for name, value in second.items():
        both = isinstance(merged.get(name), dict) and isinstance(value, dict)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def unknown_names(config: dict[str, Any], sections: Sequence[str] = _SECTIONS) -> Iterator[str]:
    """Yield a message for each unknown section, option of the Trainer, class, and argument of a class."""
    for name, value in config.items():
        if name not in sections:
            yield f"unknown option {name!r}{_hint(name, sections)}"
        if name == "trainer" and isinstance(value, dict):
            known = list(inspect.signature(Trainer).parameters)
            for option in value:
                if option not in known:
                    yield f"unknown option 'trainer.{option}'{_hint(option, known)}"
        for used in _classes_in(value, name, None):
            yield from _unknown_in(used, config)


def wrong_values(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each argument of the Trainer or of a class whose value has a wrong type."""
    for section, value in config.items():
        for used in _classes_in(value, section, Trainer if section == "trainer" else None):
            label = f"{used.key}." if used.kind in (None, Trainer) else f"{used.key} ({_name(used.kind)}): "
            for name, entry in used.arguments.items():
                if message := wrong_value(name, entry, used.known.get(name)):
                    yield f"{label}{message}"


@dataclass
class _UsedClass:
    """A class in a configuration.

    Args:
        key: dotted key of its value.
        path: its ``class_path``; empty if only the annotation names the class.
        kind: the class; None if it cannot be loaded.
        arguments: arguments in the configuration.
        known: parameters of the class with their annotations.
    """

    key: str
    path: str
    kind: Any
    arguments: dict[str, Any]
    known: dict[str, Any]


def _classes_in(value: Any, key: str, annotation: Any) -> Iterator[_UsedClass]:
    """Yield the classes in a value, outer ones first."""
    if isinstance(value, list):
        for entry in value:
            yield from _classes_in(entry, key, annotation)
    elif isinstance(value, dict):
        class_path = value.get("class_path")
        path = class_path if isinstance(class_path, str) else ""
        kind = _load(path) if path else _only_class(annotation)
        init_args = value.get("init_args")
        direct = {name: entry for name, entry in value.items() if name not in _CLASS_KEYS}  # of the command line
        arguments = _merge(init_args if isinstance(init_args, dict) else {}, direct)
        known = parameters(kind) if callable(kind) else {}
        yield _UsedClass(key=key, path=path, kind=kind, arguments=arguments, known=known)
        for name, entry in arguments.items():
            yield from _classes_in(entry, f"{key}.{name}", known.get(name))


def _unknown_in(used: _UsedClass, config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about an unknown class, and unknown arguments; those of another class in the configuration."""
    if ".py:" in used.path:
        yield f"{used.key}: {_class_in_file(used.path)}"
    elif used.path and used.kind is None:
        module_name, _, name = used.path.rpartition(".")
        module = _load(module_name)
        if module is not None:
            yield f"{used.key}: {name!r} was not found in {module_name}{_hint(name, dir(module))}"
    for name, entry in used.arguments.items():
        if used.known and name not in used.known:
            label = f"{used.key} ({_name(used.kind)})"
            hint = _hint(name, [*used.known, *_CLASS_KEYS])
            if name not in OPTION_NAMES and (owner := _owner(name, config)):
                hint = f"; it is an option of {owner}"
            yield f"{label}: unknown option {name!r}{hint}"
        if name == "engine" and isinstance(entry, str) and entry in ENGINES:
            yield f"{used.key}.{name}: expected the path of a class, got {entry!r}; use {ENGINES[entry]}"


def _class_in_file(path: str) -> str:
    """Return a message about a class path in the form of functions, ``file.py:name``."""
    file, _, name = path.rpartition(":")
    folder, stem = os.path.split(file.removesuffix(".py"))
    condition = f"with {folder} in PYTHONPATH" if folder else f"with {file} in the working directory"
    return f"class_path must be module.Class, got {path!r}: use {f'{stem}.{name}'!r}, {condition}"


def _owner(name: str, config: dict[str, Any]) -> str | None:
    """Return the key and the class that has an option in a configuration; None if no class has it."""
    for section, value in config.items():
        for used in _classes_in(value, section, Trainer if section == "trainer" else None):
            if name in used.known:
                return used.key if used.kind is Trainer else f"{used.key} ({_name(used.kind)})"
    return None


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _load(path: str) -> Any:
    """Return the object with a dotted path; None if there is an error, which jsonargparse reports."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def _only_class(annotation: Any) -> type | None:
    """Return the class in an annotation such as ``list[RewardFunction] | None``; None if there are several."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation
    kinds = [_only_class(part) for part in typing.get_args(annotation)]
    ours = [kind for kind in kinds if kind is not None and kind.__module__ not in ("builtins", "typing")]
    return ours[0] if len(ours) == 1 else None


def parameters(function: Any) -> dict[str, Any]:
    """Return the parameters of a constructor with their annotations; empty if it accepts any names.

    A constructor with ``**kwargs`` has those of the base class, too.
    """
    constructors = [function]
    if isinstance(function, type):
        constructors = [vars(base)["__init__"] for base in function.__mro__ if "__init__" in vars(base)]
    result: dict[str, Any] = {}
    for constructor in constructors:
        try:
            kinds = {name: parameter.kind for name, parameter in inspect.signature(constructor).parameters.items()}
        except ValueError:  # a function in C
            return {}
        try:
            annotations = typing.get_type_hints(constructor)
        except (NameError, TypeError):  # a name that is imported for type checkers only
            annotations = {}
        result = {name: annotations.get(name) for name, kind in kinds.items() if kind not in _VARIADIC} | result
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            result.pop("self", None)
            return result
    return {}


def _hint(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: this package's name for it, or the nearest known name."""
    if name in OPTION_NAMES:
        return f"; here it is {OPTION_NAMES[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
