"""The options in a configuration file of verl, which Hydra reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError

BASES = ("ppo_trainer", "sft_trainer", "sft_trainer_engine")  # verl's own configurations
# To another option of the file, ${a.b}, ${.b} beside the option, or ${oc.select:a.b,1} with a value if it is not set.
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^{}]*))?\}")
_DEPTH = 8  # of references to references
_MISSING = "???"  # a value that must be given


def find_configuration(name: str, path: str, folder: Path) -> Path | None:
    """Return the file that ``--config-name`` and ``--config-path`` of a script name; None if it is not here.

    Args:
        name: name of the configuration.
        path: folder of the configuration, as the script names it; may be empty.
        folder: folder of the script.
    """
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    last = Path(path).name or "config"
    folders = (Path(path), folder / path, folder, folder / last, folder.parent / last)
    found = (each.expanduser() / file for each in folders)
    return next((each for each in found if each.is_file()), None)


def configuration_options(file: Path) -> tuple[dict[str, str], list[str]]:
    """Return the options of a configuration with their values as texts, and notes about what could not be read.

    Raises:
        UsageError: the file is no mapping in YAML.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} must be a mapping of options, as verl's configurations are")
    content.pop("hydra", None)
    notes = [
        f"defaults of {file.name}: {base!r} is not read; its values that differ from verl's are lost"
        for base in _bases(content.pop("defaults", []))
        if base not in (*BASES, "_self_")
    ]
    leaves = dict(_leaves("", content))
    values = {name: text for name, text in leaves.items() if not name.endswith("._target_") and text != _MISSING}
    if len(values) < len(leaves):
        notes.append(f"{file.name} has verl's defaults too, so this list names options that you did not set")
    options = {name: _resolved(name, value, values) for name, value in values.items()}
    unknown = {name: text for name, text in options.items() if "${" in text}
    notes += [f"{name}: {text!r:.80} refers to what {file.name} does not say" for name, text in unknown.items()]
    return {name: text for name, text in options.items() if name not in unknown}, notes


def _bases(defaults: Any) -> Iterator[str]:
    for entry in defaults if isinstance(defaults, list) else []:
        yield from (f"{group}: {name}" for group, name in entry.items()) if isinstance(entry, dict) else [str(entry)]


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each option with its value as text, as on Hydra's command line."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, str):
        yield prefix, value
    else:
        yield prefix, json.dumps(value, default=str)


def _resolved(name: str, text: str, values: dict[str, str], depth: int = 0) -> str:
    """Return a value with the values of the options that it refers to, as far as the file sets them."""

    def value(match: re.Match[str]) -> str:
        levels = len(match[1]) - len(match[1].lstrip("."))
        above = name.split(".")[:-levels] if levels else []
        referred = ".".join([*above, match[1].lstrip(".")])
        if referred in values and depth < _DEPTH:
            return _resolved(referred, values[referred], values, depth + 1)
        is_mapping = any(option.startswith(f"{referred}.") for option in values)
        return match[0] if match[2] is None or is_mapping or referred in values else match[2].strip("'\"")

    return _REFERENCE.sub(value, text)
