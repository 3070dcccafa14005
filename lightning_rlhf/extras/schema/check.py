"""Mistakes in a configuration that the schema knows, found without importing torch.

Only this package's own classes and the Trainer are judged. A class of a user may be right, and so may a file in the
place of a value. The parser decides in any case.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_rlhf.cli.config_files import config_files
from lightning_rlhf.cli.early import hint, suggestion
from lightning_rlhf.cli.merging import CLASS_KEYS, REQUIRED, ROLLOUT, SECTIONS, merged_settings
from lightning_rlhf.cli.signatures import CLASSES, Schema, alternatives, classes_of, fits, is_plain
from lightning_rlhf.extras.schema.class_names import wrong_names, wrong_section
from lightning_rlhf.extras.schema.inputs import mistakes_of_inputs
from lightning_rlhf.extras.schema.known import definition, find, names, schema
from lightning_rlhf.extras.schema.option_names import OPTION_NAMES
from lightning_rlhf.extras.schema.used import Used, classes_in, trainer
from lightning_rlhf.launch_environment import Machine
from lightning_rlhf.moved import new_name
from lightning_rlhf.strategies.names import REGISTERED

Mistake = tuple[str, tuple[str, ...]]  # a message, and the names that the parser's own message would contain
_WORDS = {
    "integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a text", "null": "null",
    "array": "a list", "object": "names with values",
}  # fmt: skip
_ENTRIES = {"integer": " of integers", "number": " of numbers", "string": " of texts"}
_OPTIONS = ("print_config", "help", "h", "optimizer", "lr_scheduler")  # of the command line alone
# Arguments of an optimizer, whose class may be anyone's.
_OPTIMIZERS = ("model.optimizer", "model.critic_optimizer")
_NUMBERS: dict[str, Schema] = {name: {"type": "number"} for name in ("lr", "weight_decay", "eps")}
OWN_OPTIONS: dict[str, tuple[str, ...]] = {  # of commands that do not run the configuration
    "check-data": ("json",), "plan": ("gpu", "gpus", "gpu-memory-gib", "nodes"), "export": (),
}  # fmt: skip
_FIELDS = (
    "prompt", "completion", "messages", "text", "chosen", "rejected", "label", "margin", "ground_truth", "data_source",
    "extra_info", "tools", "system", "history", "images", "chat_template_kwargs", "source",
)  # fmt: skip
_MOST_CHARACTERS = 100  # longest value in a message


def mistakes(arguments: Sequence[str], command: str) -> dict[str, tuple[str, ...]]:
    """Return the mistakes in the configuration of a run: each message, with the names that it is about.

    Args:
        arguments: command line after the command's name.
        command: command that reads the configuration; its files must exist, except for those of OWN_OPTIONS.
    """
    settings = merged_settings(arguments, find)
    config = settings.values
    unknown = [*_unknown_arguments(settings.arguments, config, OWN_OPTIONS.get(command, ())), *_wrong_counts(arguments)]
    if not config_files(arguments):
        return dict(unknown)
    found = [*unknown, *_unknown(config)]
    is_part = any(argument.startswith("--print_config") for argument in arguments)  # it may be a part of one
    if not is_part:
        found += _missing(config)
    found += _wrong(config)
    if command and command not in OWN_OPTIONS and not is_part:
        found += [(message, ()) for message in mistakes_of_inputs(config, command)]
    return dict(found)


def _used(config: dict[str, Any]) -> Iterator[Used]:
    """Yield the classes in a configuration, and the Trainer."""
    if isinstance(config.get("trainer"), dict):
        yield trainer(config["trainer"])
    for section, value in config.items():
        if section in REQUIRED and isinstance(value, str):
            value = {"class_path": value}
        yield from classes_in(value, section, schema()["properties"].get(section))


def _unknown_arguments(arguments: Sequence[str], config: dict[str, Any], own: Sequence[str]) -> Iterator[Mistake]:
    known = [*schema()["properties"], *_OPTIONS, *own]
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].partition(".")[0]
        if argument.startswith("--") and name and name not in known:
            option = None if name in OPTION_NAMES else _full_option(name, config)
            end = f"; write --{option}" if option else _hint(name, [*schema()["properties"], *own])
            yield f"unknown option {name!r}{end}", (name,)


def _wrong_counts(arguments: Sequence[str]) -> Iterator[Mistake]:
    """Yield the numbers of ``plan`` that are none."""
    for option, following in itertools.pairwise([*arguments, ""]):
        name, has_value, value = option.partition("=")
        value = value if has_value else following
        if name in ("--gpus", "--nodes") and not (value.isdecimal() and int(value) > 0):
            yield f"{name} must be a whole number of at least 1, got {value!r}", (name.removeprefix("--"),)


def _full_option(name: str, config: dict[str, Any]) -> str | None:
    """Return the option of the command line for an option of the Trainer, module, data or RolloutLoop; None without."""
    for used in _used(config):
        if name in used.options:
            if used.is_trainer:
                return f"trainer.{name}"
            if used.key in REQUIRED:
                return f"{used.key}.init_args.{name}"
            if used.key == "trainer.callbacks" and used.path.endswith(".RolloutLoop"):
                return f"{ROLLOUT}.{name}"
    return None


def _unknown(config: dict[str, Any]) -> Iterator[Mistake]:
    """Yield unknown sections, unknown classes, and unknown options of classes."""
    for name in config:
        if name not in schema()["properties"]:
            yield (
                f"unknown option {name!r}{_hint(str(name), (*SECTIONS, 'seed_everything', 'ckpt_path'))}",
                (str(name),),
            )
    yield from _moved(config)
    yield from _beside(config)
    for used in _used(config):
        if used.path and used.entry is None and (message := _unknown_class(used)):
            yield f"{used.key}{message}", (used.path,)
        yield from _misspelt_fields(used)
        for name in used.unknown:
            if used.is_trainer:
                yield f"unknown option 'trainer.{name}'{_hint(name, used.options)}", (name,)
                continue
            longer = [option for option in used.options if option.startswith(f"{name}_")]
            owner = None if name in OPTION_NAMES else _owner(name, config) or _other_section(used, name)
            end = f"; it is an option of {owner}" if owner else _hint(name, [*used.options, *CLASS_KEYS])
            if longer and name not in OPTION_NAMES:
                end = f"; did you mean {longer[0]!r}?"
            yield f"{used.label}: unknown option {name!r}{end}", (name,)


def _beside(value: Any, key: str = "") -> Iterator[Mistake]:
    """Yield the options that stand beside ``init_args``, where the parser does not read them."""
    if isinstance(value, list):
        for entry in value:
            yield from _beside(entry, key)
    if not isinstance(value, dict):
        return
    names = [str(name) for name in value if name not in CLASS_KEYS]
    if isinstance(value.get("class_path"), str) and names:
        yield f"{key}: {', '.join(names)} must be in init_args, not beside it", (key,)
    for name, part in value.items():
        yield from _beside(part, f"{key}.{name}".removeprefix(".").removesuffix(".init_args"))


def _moved(value: Any, key: str = "") -> Iterator[Mistake]:
    """Yield the old names of classes and functions that were moved, whether in ``class_path`` or as plain values."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _moved(
                each, key if name == "class_path" else f"{key}.{name}".removeprefix(".").removesuffix(".init_args")
            )
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _moved(each, f"{key}.{number}")
    elif isinstance(value, str) and (now := new_name(value)) is not None:
        yield f"{key}: {value} is now {now}", (value,)


def _unknown_class(used: Used) -> str:
    """Return the end of a message about the name of a class that cannot exist; empty if it may exist."""
    path = used.path
    package, _, name = path.rpartition(".")
    if new_name(path) is not None:
        return ""
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        folder, _, stem = file.removesuffix(".py").rpartition("/")
        condition = f"with {folder} in PYTHONPATH" if folder else f"with {file} in the working directory"
        return f": class_path must be module.Class, got {path!r}: use {f'{stem}.{name}'!r}, {condition}"
    if used.key == "trainer.strategy" and path in REGISTERED:
        return f": class_path must be a class, got {path!r}, the name of a strategy: write trainer.strategy: {path}"
    if not package and used.key not in REQUIRED:
        return ""  # such as AdamW, which the parser finds
    known = [each.rpartition(".")[2] for each in names() if each.rpartition(".")[0] == (package or "lightning_rlhf")]
    near = suggestion(name.replace("Trainer", "Module"), known)
    if not near:
        return ""
    if not package:
        return f": class_path must be package.Class, got {path!r}{near}"
    return f": {name!r} was not found in {package}{near}"


def _misspelt_fields(used: Used) -> Iterator[Mistake]:
    """Yield the fields of ``columns`` that are nearly those of a data module; further ones name columns for rewards."""
    columns = used.arguments.get("columns") if used.key == "data" else None
    for field, value in columns.items() if isinstance(columns, dict) else ():
        if not isinstance(field, str):
            continue
        name, colon, column = field.partition(":")
        if colon and value is None:
            yield f"{used.label}: columns has {field!r}: write {{{name}: {column}}}, with a space", (field,)
        elif field not in _FIELDS and (near := difflib.get_close_matches(field, _FIELDS, n=1, cutoff=0.8)):
            yield f"{used.label}: columns has the unknown field {field!r}; did you mean {near[0]!r}?", (field,)


def _missing(config: dict[str, Any]) -> Iterator[Mistake]:
    for name in REQUIRED:
        if config.get(name) is None:
            yield f"the section {name!r} is missing: it has class_path and init_args", (name,)
    for used in _used(config):
        if missing := used.missing:
            yield f"{used.label}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", tuple(missing)


def _wrong(config: dict[str, Any]) -> Iterator[Mistake]:
    """Yield the options whose values have a wrong type."""
    seed = config.get("seed_everything")
    if not fits(seed, {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]}):
        yield f"seed_everything must be an integer, true or false, got {seed!r}", ("seed_everything",)
    accelerator = config["trainer"].get("accelerator") if isinstance(config.get("trainer"), dict) else None
    if accelerator in ("gpu", "cuda") and not Machine.here(os.environ).has_gpu:
        message = f"trainer.accelerator is {accelerator!r}, but this machine has no NVIDIA GPU: remove it, or set cpu"
        yield message, (f"No supported {accelerator} backend",)
    for section in REQUIRED:
        if message := wrong_section(section, config.get(section)):
            yield f"{section}{message}", (section,)
    for used in _used(config):
        wrong = dict(wrong_names(used))
        yield from ((message, (name,)) for message, name in wrong.items())
        label = "trainer." if used.is_trainer else f"{used.label}: "
        for name, value in used.arguments.items():
            if f"{used.key}.{name}" in _OPTIMIZERS and fits(value, _NUMBERS["lr"]):
                message = f"{used.label}: {name} must be a class or its options, got {value!r}: write {{lr: {value}}}"
                yield message, (name, _not_a_mapping(value))
                continue
            option = used.options.get(name, _NUMBERS.get(name, {}) if used.key in _OPTIMIZERS else {})
            if not fits(value, option) and value not in wrong.values():
                yield f"{label}{wrong_value(name, value, option)}", (name, _not_a_mapping(value))


def _not_a_mapping(value: Any) -> str:
    """Return the text of Python's error about a plain value in the place of a class's options."""
    return f"must be a mapping, not {type(value).__name__}"


def wrong_value(name: str, value: Any, option: Schema) -> str:
    """Return a message about the value of an option that has a wrong type.

    Args:
        name: name of the option.
        value: its value in a configuration, or the text of the command line.
        option: its node in the schema.
    """
    shown = repr(value) if len(repr(value)) <= _MOST_CHARACTERS else f"{repr(value)[:_MOST_CHARACTERS]}..."
    message = f"{name} must be {_described(option)}, got {shown}"
    if _WORDS["integer"] in message and (whole := _whole_number(value)) is not None:
        return f"{message}: write {whole}"
    if short := next(filter(None, (_as_option(value, each) for each in alternatives(option))), ""):
        return f"{message}: write {name}: {short}"
    if value == "all-linear":  # peft's word
        return f"{message}: write null, which is all linear layers"
    bases = set(classes_of(option))
    entries = [entry for entry in schema()["$defs"].values() if not bases.isdisjoint(entry.get("x-bases", ()))]
    available = ", ".join(sorted(entry["x-names"][0] for entry in entries))
    return f"{message}; available: {available}" if available else message


def _whole_number(value: Any) -> int | None:
    """Return a number without a fraction that was written with a point or an exponent, such as ``1e3``; else None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


def _described(option: Schema) -> str:
    nodes = alternatives(option)
    literals = [repr(choice) for node in nodes for choice in node.get("enum", ())]
    texts = [f"{'one of ' if len(literals) > 1 else ''}{', '.join(literals)}"] if literals else []
    for node in nodes:
        kinds = node.get("type", "")
        if CLASSES in node:
            texts.append("a class (class_path: package.Class)")
        elif kinds and not (kinds == "string" and "pattern" in node):
            entries = _ENTRIES.get(_first_type(node.get("items", {})), "")
            texts.append(_WORDS[_first_type(node)] + entries)
    return " or ".join(dict.fromkeys(texts))


def _first_type(node: Schema) -> str:
    kinds = node.get("type", "")
    return kinds if isinstance(kinds, str) else kinds[0]


def _as_option(value: Any, node: Schema) -> str:
    """Return a plain value as the first option of a class, or of the class of a list; empty if it does not fit."""
    bases = classes_of(node.get("items", node))
    entry = definition(bases[0]) if len(bases) == 1 else None
    if entry is None or not is_plain(value):
        return ""
    first, option = next(iter(entry["properties"].items()), ("", {}))
    if not first or not fits(value, option):
        return ""
    text = f"{{{first}: {value}}}"
    return f"[{text}]" if "items" in node else text


def _owner(name: str, config: dict[str, Any]) -> str | None:
    """Return the key and the class that has an option in a configuration; None if no class has it."""
    return next((used.label for used in reversed(list(_used(config))) if name in used.options), None)


def _other_section(used: Used, name: str) -> str | None:
    """Return the modules that have an option that the configured one does not have."""
    base = classes_of(schema()["properties"].get(used.key))
    if used.key not in REQUIRED:
        return None
    entries = [entry for entry in schema()["$defs"].values() if not set(base).isdisjoint(entry.get("x-bases", ()))]
    titles = sorted(entry["title"] for entry in entries if name in entry["properties"])
    if not titles:
        return None
    return f"{titles[0]} and others" if len(titles) > 1 else titles[0]


def _hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: this package's name for it, the nearest, or all names."""
    if name in OPTION_NAMES:
        return f"; here it is {OPTION_NAMES[name]}"
    known = list(known)
    return suggestion(name, known) or hint(name, [each for each in known if each not in CLASS_KEYS])
