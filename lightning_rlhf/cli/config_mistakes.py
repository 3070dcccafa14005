"""Mistakes in a configuration that are found without importing torch: unknown names, missing names, wrong types."""

from __future__ import annotations

import ast
import itertools
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.config_files import add_import_folders, check_config_files, config_files, read_yaml
from lightning_rlhf.cli.errors import in_one_message
from lightning_rlhf.cli.option_names import ENGINES, OPTION_NAMES
from lightning_rlhf.cli.source_classes import (
    Absent,
    Parameter,
    SourceClass,
    SourceModule,
    class_named,
    find_class,
    find_module,
    suggestion,
)
from lightning_rlhf.cli.wrong_values import wrong_value
from lightning_rlhf.expected_errors import UsageError

_SECTIONS = ("model", "data", "trainer", "seed_everything", "ckpt_path", "config")
_OF_LIGHTNING = ("weights_only", "verbose", "return_predictions")  # in the config.yaml of a run
_REQUIRED = ("model", "data")
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_LOOP = "lightning_rlhf.callbacks.rollout_loop.RolloutLoop"
_REWARD = "lightning_rlhf.rewards.function.RewardFunction"


def check_settings(arguments: Sequence[str]) -> None:
    """Validate the configuration files and options of a run, before libraries are imported that take seconds.

    Args:
        arguments: command line behind the command's name.

    Raises:
        UsageError: the message has all mistakes that were found, one in a line.
    """
    config = read_settings(arguments)
    if config is None:
        return
    messages = list(dict.fromkeys(mistakes(config)))
    if messages:
        raise UsageError(in_one_message(messages))


def read_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the content of the configuration files and options of a run; None without a file, or if help is wanted.

    Args:
        arguments: command line behind the command's name.

    Raises:
        UsageError: a file does not exist or is not YAML, or an option is of a callback that it cannot reach.
    """
    find_module.cache_clear()  # a file may be new since an earlier command of this process
    add_import_folders(arguments)
    check_config_files(arguments)
    files = config_files(arguments)
    if not files or any(own in ("-h", "--help") or own.partition("=")[0].endswith(".help") for own in arguments):
        return None
    config: dict[str, Any] = {}
    for file in files:
        config = _merge(config, read_yaml(file))
    settings = _settings_of(arguments)
    if _is_of_another_callback(settings, config):
        raise UsageError(
            "on the command line, --trainer.callbacks.NAME is an option of the last callback in the configuration: "
            "set options of other callbacks in its file"
        )
    return _merge(config, settings)


def doubts(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each optimizer without a learning rate whose own default is more than ten times the usual.

    Args:
        config: content of the configuration files and options of a run.
    """
    for module in itertools.islice(_classes_in(config.get("model"), "model", None), 1):
        for name, known in module.known.items():
            entry = module.arguments.get(name)
            entry = {"class_path": entry} if isinstance(entry, str) else entry
            optimizer = next(_classes_in(entry, f"model.{name}", None), None)
            if optimizer is None or "lr" not in optimizer.known or "lr" in optimizer.arguments:
                continue
            own, usual = (_rate(own.default) for own in (optimizer.known["lr"], known))
            if own is not None and usual is not None and own > 10 * usual:
                yield (
                    f"{optimizer.label}: lr is not set, so it is {own:g}, the default of this class; without {name} it "
                    f"would be {usual:g}. Set lr in its init_args: docs/hyperparameters.md has usual values"
                )


def _rate(default: ast.expr | None) -> float | None:
    """Return a learning rate that is a default, or an argument ``lr`` in one; None without one."""
    words = [] if default is None else [own for own in ast.walk(default) if isinstance(own, ast.keyword)]
    value = next((own.value for own in words if own.arg == "lr"), default)
    rate = value.value if isinstance(value, ast.Constant) else None
    return float(rate) if isinstance(rate, int | float) else None


def mistakes(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each mistake in a configuration.

    Args:
        config: content of the configuration files and options of a run.
    """
    yield from unknown_names(config)
    yield from missing_names(config)
    yield from wrong_values(config)
    yield from _wrong_loops(config)


def unknown_names(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each unknown section, option of the Trainer, class, and argument of a class."""
    for name, value in config.items():
        if name not in (*_SECTIONS, *_OF_LIGHTNING):
            yield f"unknown option {name!r}{hint(name, _SECTIONS)}"
        if name == "trainer" and isinstance(value, dict):
            known = _trainer().parameters
            for option in value:
                if option not in known:
                    yield f"unknown option 'trainer.{option}'{hint(option, known)}"
        for used in _classes_in(value, name, None):
            yield from _unknown_in(used, config)


def missing_names(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each missing section, and each missing argument of a class."""
    for name in _REQUIRED:
        if config.get(name) is None:
            yield f"the section {name!r} is missing: it has class_path and init_args"
    for section, value in config.items():
        for used in _classes_in(value, section, None):
            names = [own for own, known in used.known.items() if known.is_required and own not in used.arguments]
            if names and used.is_complete:
                yield f"{used.label}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"


def wrong_values(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each argument of the Trainer or of a class whose value has a wrong type."""
    for section, value in config.items():
        for used in _classes_in(value, section, _trainer() if section == "trainer" else None):
            label = f"{used.key}." if used.kind is None or used.is_trainer else f"{used.label}: "
            for name, entry in used.arguments.items():
                if name == "engine" and isinstance(entry, str) and entry in ENGINES:
                    yield f"{used.key}.{name}: expected the path of a class, got {entry!r}; use {ENGINES[entry]}"
                elif name in used.known and (message := wrong_value(name, entry, used.known[name].annotation)):
                    yield f"{label}{message}"


@dataclass(frozen=True)
class _UsedClass:
    """A class in a configuration.

    Args:
        key: dotted key of its value.
        path: its ``class_path``; empty if only the annotation names the class.
        kind: the class; None if it is unknown, or does not exist.
        arguments: arguments in the configuration.
        absent: sentence about a class that does not exist.
        is_complete: whether the configuration has all arguments of the constructor.
    """

    key: str
    path: str
    kind: SourceClass | None
    arguments: dict[str, Any]
    absent: str = ""
    is_complete: bool = False

    @property
    def known(self) -> dict[str, Parameter]:
        """Parameters of the class; empty if they are unknown."""
        return {} if self.kind is None else self.kind.parameters

    @property
    def is_trainer(self) -> bool:
        """Whether the class is Lightning's Trainer."""
        return self.kind is not None and self.kind.path == _TRAINER

    @property
    def label(self) -> str:
        """Key and class, for messages."""
        return self.key if self.kind is None or self.is_trainer else f"{self.key} ({self.kind.name})"


def _classes_in(value: Any, key: str, annotation: Any) -> Iterator[_UsedClass]:
    """Yield the classes in a value, outer ones first.

    Args:
        value: part of a configuration.
        key: its dotted key.
        annotation: annotation of the parameter, or the class itself; None if it is unknown.
    """
    if isinstance(value, list):
        for entry in value:
            yield from _classes_in({"class_path": entry} if _is_callback(key, entry) else entry, key, annotation)
    elif isinstance(value, dict):
        class_path = value.get("class_path")
        path = class_path if isinstance(class_path, str) else ""
        named = _found(path) if path else _only_class(annotation)
        kind = named if isinstance(named, SourceClass) else None
        init_args = value.get("init_args")
        direct = {name: entry for name, entry in value.items() if name not in _CLASS_KEYS}  # of the command line
        arguments = _merge(init_args if isinstance(init_args, dict) else {}, direct)
        is_complete = key in _REQUIRED or key == "trainer.callbacks" or _accepts(annotation, kind)
        absent = named.message if isinstance(named, Absent) else ""
        yield _UsedClass(key, path, kind, arguments, absent=absent, is_complete=is_complete)
        known = {} if kind is None else kind.parameters
        for name, entry in arguments.items():
            inner = known[name].annotation if name in known else None
            yield from _classes_in(entry, f"{key}.{name}", inner)


def _accepts(annotation: Any, kind: SourceClass | None) -> bool:
    """Return whether a class is one of those in an annotation, or a subclass."""
    options = [annotation, *typing.get_args(annotation)]
    sources = [source for own in options if (source := getattr(own, "source", None)) is not None]
    return kind is not None and any(kind.is_subclass(source.path) for source in sources)


def _is_callback(key: str, entry: Any) -> bool:
    """Return whether an entry of a list is the path of a callback without arguments."""
    return key == "trainer.callbacks" and isinstance(entry, str)


def _found(path: str) -> Any:
    """Return the class with a full or short name; None if it is unknown, Absent if it does not exist."""
    return find_class(path) if "." in path and ".py:" not in path else class_named(path)


def _trainer() -> SourceClass:
    trainer = find_class(_TRAINER)
    assert isinstance(trainer, SourceClass)
    return trainer


def _unknown_in(used: _UsedClass, config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about an unknown class, and unknown arguments; those of another class in the configuration."""
    if ".py:" in used.path:
        yield f"{used.key}: {_class_in_file(used.path)}"
    elif used.key == "trainer.strategy" and "." not in used.path and used.path and used.kind is None:
        yield (
            f"trainer.strategy: class_path must be a class, got {used.path!r}, the name of a strategy: write "
            f"trainer.strategy: {used.path}, or the class_path of a strategy, one of {', '.join(_strategies())}"
        )
    elif used.absent:
        yield f"{used.key}: {used.absent}"
    for name in used.arguments:
        if used.known and name not in used.known:
            if name not in OPTION_NAMES and (owner := _owner(name, config)):
                yield f"{used.label}: unknown option {name!r}; it is an option of {owner}"
            else:
                yield f"{used.label}: unknown option {name!r}{hint(name, [*used.known, *_CLASS_KEYS])}"
    reference = used.arguments.get("function")
    is_reward = used.kind is not None and used.kind.path == _REWARD
    if is_reward and isinstance(reference, str) and (message := _missing_function(reference)):
        yield f"reward function {reference!r}: {message}"


def _class_in_file(path: str) -> str:
    """Return a message about a class path in the form of functions, ``file.py:name``."""
    file, _, name = path.rpartition(":")
    folder, stem = os.path.split(file.removesuffix(".py"))
    condition = f"with {folder} in PYTHONPATH" if folder else f"with {file} in the working directory"
    return f"class_path must be module.Class, got {path!r}: use {f'{stem}.{name}'!r}, {condition}"


def _strategies() -> list[str]:
    """Return the paths of the classes of strategies."""
    names = ("single.RLHFSingleDeviceStrategy", "ddp.RLHFDDPStrategy", "fsdp.RLHFFSDPStrategy")
    return [f"lightning_rlhf.strategies.{name}" for name in (*names, "deepspeed.strategy.RLHFDeepSpeedStrategy")]


def _missing_function(reference: str) -> str:
    """Return a message about a reference of a function that does not exist; empty if it exists or is unknown."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source.endswith(".py"):
        function = find_class(f"{source}.{name}" if colon else reference)
        return function.message if isinstance(function, Absent) and "was not found" in function.message else ""
    path = Path(source).expanduser()
    path = next((own for folder in (".", *sys.path) if (own := Path(folder, path)).is_file()), path)
    if not path.is_file():
        return ""
    module = SourceModule(source, path)
    if not isinstance(module.member(name), Absent):
        return ""
    functions = sorted(own for own in module.definitions if not own.startswith("_"))
    near = suggestion(name, functions)
    available = f"; available: {', '.join(functions)}" if functions else ""
    return f"{name!r} was not found in {source}{near or available}"


def _wrong_loops(config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about callbacks that generate rollouts: a run has one, and val_metric is one of its rewards."""
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    used = _classes_in(callbacks, "trainer.callbacks", None) if isinstance(callbacks, list) else ()
    loops = [own for own in used if own.kind is not None and own.kind.is_subclass(_LOOP)]
    if len(loops) > 1:
        yield f"trainer.callbacks has {len(loops)} RolloutLoops, allowed: one; put all rewards into its list of rewards"
    for loop in loops:
        rewards, metric = loop.arguments.get("rewards") or [], loop.arguments.get("val_metric")
        if isinstance(metric, str) and isinstance(rewards, list) and all(isinstance(own, dict) for own in rewards):
            labels = [own.get("name") or str(own.get("function")).replace(":", ".").split(".")[-1] for own in rewards]
            labels += ["environment"] if loop.arguments.get("environment") else []
            if metric not in labels and not any("class_path" in own for own in rewards):
                yield f"{loop.label}: val_metric must be the name of a reward, one of {labels}, got {metric!r}"


def _owner(name: str, config: dict[str, Any]) -> str | None:
    """Return the key and the class that has an option in a configuration; None if no class has it."""
    for section, value in config.items():
        for used in _classes_in(value, section, _trainer() if section == "trainer" else None):
            if name in used.known:
                return used.label
    return None


def _only_class(annotation: Any) -> SourceClass | None:
    """Return the class in an annotation such as ``list[RewardFunction] | None``; None if there are several."""
    if isinstance(annotation, SourceClass):
        return annotation
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return getattr(annotation, "source", None)
    kinds = [_only_class(part) for part in typing.get_args(annotation)]
    ours = [kind for kind in kinds if kind is not None]
    return ours[0] if len(ours) == 1 else None


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: this package's name for it, the nearest, or all names."""
    if name in OPTION_NAMES:
        return f"; here it is {OPTION_NAMES[name]}"
    names = [own for own in known if own not in _CLASS_KEYS]
    return suggestion(name, list(known)) or f"; known: {', '.join(sorted(names))}"


def _is_of_another_callback(settings: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether the command line has an option of callbacks that the last one of a configuration does not have."""
    options = settings["trainer"].get("callbacks") if isinstance(settings.get("trainer"), dict) else None
    callbacks = config["trainer"].get("callbacks") if isinstance(config.get("trainer"), dict) else None
    if not isinstance(options, dict) or not isinstance(callbacks, list) or not callbacks:
        return False
    init_args = options.get("init_args")
    names = {*options, *(init_args if isinstance(init_args, dict) else ())} - set(_CLASS_KEYS)
    last = next(_classes_in(callbacks[-1:], "trainer.callbacks", None), None)
    return last is not None and bool(last.known) and not names <= last.known.keys()


def _settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line as a nested dictionary."""
    settings: dict[str, Any] = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if not argument.startswith("--"):
            continue
        name, has_value, value = argument.removeprefix("--").partition("=")
        *sections, last = name.removesuffix("+").split(".")
        if name == "config" or (not sections and name not in _SECTIONS):  # others are options of the command
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
    """Merge nested dictionaries; the second overrides values. Of another class, it keeps the arguments that it knows.

    A dictionary for a list has options of its last entry, as on the command line.
    """
    merged = dict(first)
    path, before = second.get("class_path"), first.get("init_args")
    if isinstance(path, str) and path != first.get("class_path") and isinstance(before, dict):
        kind = _found(path)
        known = kind.parameters if isinstance(kind, SourceClass) else {}
        merged["init_args"] = {name: value for name, value in before.items() if name in known}
    for name, value in second.items():
        before = merged.get(name)
        if isinstance(before, list) and before and isinstance(before[-1], dict) and isinstance(value, dict):
            merged[name] = [*before[:-1], _merge(before[-1], value)]
        elif isinstance(before, dict) and isinstance(value, dict):
            merged[name] = _merge(before, value)
        else:
            merged[name] = value
    return merged
