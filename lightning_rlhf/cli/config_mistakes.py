"""Mistakes in a configuration that are found without importing torch: unknown names, missing names, wrong types."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.config_files import add_import_folders, check_config_files, config_files, wants_help
from lightning_rlhf.cli.early_checks import early_mistakes
from lightning_rlhf.cli.errors import in_one_message
from lightning_rlhf.cli.merging import SECTIONS, merged_settings
from lightning_rlhf.cli.option_names import ENGINES, OPTION_NAMES
from lightning_rlhf.cli.source_classes import (
    Absent,
    SourceModule,
    find_class,
    find_module,
    suggestion,
)
from lightning_rlhf.cli.used_classes import (
    CLASS_KEYS,
    REQUIRED,
    UsedClass,
    classes_in,
    named_class,
    trainer_class,
)
from lightning_rlhf.cli.wrong_values import wrong_value
from lightning_rlhf.expected_errors import UsageError

_SECTIONS = (*SECTIONS, "seed_everything", "ckpt_path", "config")
_OF_LIGHTNING = ("weights_only", "verbose", "return_predictions")  # in the config.yaml of a run
_PACKAGE = "lightning_rlhf"
_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_REWARD = "lightning_rlhf.rewards.function.RewardFunction"


def check_settings(arguments: Sequence[str], command: str) -> None:
    """Validate the configuration files and options of a run, before libraries are imported that take seconds.

    Args:
        arguments: command line after the command's name.
        command: command that runs the configuration, for which its files must exist; empty for others.

    Raises:
        UsageError: the message has all mistakes that were found, one in a line.
    """
    config = read_settings(arguments)
    if config is None:
        return
    if any(argument.startswith("--print_config") for argument in arguments):  # also of a part of a configuration
        messages = [*unknown_names(config), *wrong_values(config)]
    else:
        messages = [*mistakes(config), *(early_mistakes(config, command) if command else [])]
    messages = list(dict.fromkeys(messages))
    if messages:
        raise UsageError(in_one_message(messages))


def read_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the content of the configuration files and options of a run; None without a file, or if help is wanted.

    Args:
        arguments: command line after the command's name.

    Raises:
        UsageError: a file does not exist or is not YAML, or an option has no value.
    """
    find_module.cache_clear()  # a file may be new since an earlier command of this process
    add_import_folders(arguments)
    check_config_files(arguments)
    if not config_files(arguments) or wants_help(arguments):
        return None
    return merged_settings(arguments).values


def mistakes(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each mistake in a configuration.

    Args:
        config: content of the configuration files and options of a run.
    """
    yield from unknown_names(config)
    yield from missing_names(config)
    yield from wrong_values(config)


def unknown_names(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each unknown section, option of the Trainer, class, and argument of a class."""
    for name, value in config.items():
        if name not in (*_SECTIONS, *_OF_LIGHTNING):
            yield f"unknown option {name!r}{hint(name, _SECTIONS)}"
        if name == "trainer" and isinstance(value, dict):
            known = trainer_class().parameters
            for option in value:
                if option not in known:
                    yield f"unknown option 'trainer.{option}'{hint(option, known)}"
        for used in classes_in(value, name, None):
            yield from _unknown_in(used, config)


def missing_names(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each missing section, and each missing argument of a class."""
    for name in REQUIRED:
        if config.get(name) is None:
            yield f"the section {name!r} is missing: it has class_path and init_args"
    for section, value in config.items():
        for used in classes_in(value, section, None):
            names = [
                required
                for required, known in used.known.items()
                if known.is_required and required not in used.arguments
            ]
            if names and used.is_complete:
                yield f"{used.label}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
            elif _needs_rate(used):
                yield f"{used.label}: lr is missing: an optimizer that is named by class_path has no rate of the module"


def _needs_rate(used: UsedClass) -> bool:
    """Return whether this is an optimizer by name without its rate: the module's own belongs to another class."""
    is_optimizer = bool(used.path) and used.kind is not None and used.kind.is_subclass(_OPTIMIZER)
    return is_optimizer and "lr" not in used.arguments and (not used.known or "lr" in used.known)


def wrong_values(config: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each argument of the Trainer or of a class whose value has a wrong type."""
    for section, value in config.items():
        for used in classes_in(value, section, trainer_class() if section == "trainer" else None):
            if used.kind is None or used.is_trainer:
                label = f"{used.key}."
            else:
                label = f"{used.label}: "
            for name, entry in used.arguments.items():
                if name == "engine" and isinstance(entry, str) and entry in ENGINES:
                    yield f"{used.key}.{name}: expected the path of a class, got {entry!r}; use {ENGINES[entry]}"
                elif name in used.known and (message := wrong_value(name, entry, used.known[name].annotation)):
                    yield f"{label}{message}"


def _unknown_in(used: UsedClass, config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about an unknown class, and unknown arguments; those of another class in the configuration."""
    if ".py:" in used.path:
        yield f"{used.key}: {_class_in_file(used.path)}"
    elif used.key == "trainer.strategy" and "." not in used.path and used.path and used.kind is None:
        yield (
            f"trainer.strategy: class_path must be a class, got {used.path!r}, the name of a strategy: write "
            f"trainer.strategy: {used.path}, or the class_path of a strategy, one of {', '.join(_strategies())}"
        )
    elif used.key in REQUIRED and used.path and "." not in used.path:
        public = [name for name in find_module(_PACKAGE).names if not name.startswith("_")]  # type: ignore[union-attr]
        yield f"{used.key}: class_path must be package.Class, got {used.path!r}{suggestion(used.path, public)}"
    elif used.absent:
        yield f"{used.key}: {used.absent}"
    for name in used.arguments:
        if used.known and name not in used.known:
            if name not in OPTION_NAMES and (owner := _owner(name, config)):
                yield f"{used.label}: unknown option {name!r}; it is an option of {owner}"
            else:
                yield f"{used.label}: unknown option {name!r}{hint(name, [*used.known, *CLASS_KEYS])}"
    reference = used.arguments.get("function")
    is_reward = used.kind is not None and used.kind.path == _REWARD
    if is_reward and isinstance(reference, str) and (message := _missing_function(reference)):
        yield f"reward function {reference!r}: {message}"
    loss = used.arguments.get("policy_loss", {})
    if not isinstance(loss, dict) and (message := _missing_loss(loss)):
        yield f"{used.label}: policy_loss {loss!r}: {message}"


def _class_in_file(path: str) -> str:
    """Return a message about a class path in the form of functions, ``file.py:name``."""
    file, _, name = path.rpartition(":")
    folder, stem = os.path.split(file.removesuffix(".py"))
    if folder:
        condition = f"with {folder} in PYTHONPATH"
    else:
        condition = f"with {file} in the working directory"
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
        if isinstance(function, Absent) and "was not found" in function.message:
            return function.message
        return ""
    path = Path(source).expanduser()
    path = next((candidate for folder in (".", *sys.path) if (candidate := Path(folder, path)).is_file()), path)
    if not path.is_file():
        return ""
    module = SourceModule(source, path)
    if not isinstance(module.member(name), Absent):
        return ""
    functions = sorted(definition for definition in module.definitions if not definition.startswith("_"))
    near = suggestion(name, functions)
    available = f"; available: {', '.join(functions)}" if functions else ""
    return f"{name!r} was not found in {source}{near or available}"


def _missing_loss(name: Any) -> str:
    """Return a message about a policy loss that does not exist; empty if it exists or is unknown."""
    if isinstance(name, str) and ("." in name or ":" in name):
        return _missing_function(name)
    if isinstance(name, str) and named_class(name) is not None:
        return ""
    return "expected the name of a class such as ReinforceLoss, or of a function such as losses.py:my_loss"


def _owner(name: str, config: dict[str, Any]) -> str | None:
    """Return the key and the class that has an option in a configuration; None if no class has it."""
    for section, value in config.items():
        for used in classes_in(value, section, trainer_class() if section == "trainer" else None):
            if name in used.known:
                return used.label
    return None


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: this package's name for it, the nearest, or all names."""
    if name in OPTION_NAMES:
        return f"; here it is {OPTION_NAMES[name]}"
    names = [name for name in known if name not in CLASS_KEYS]
    return suggestion(str(name), list(known)) or f"; known: {', '.join(sorted(names))}"
