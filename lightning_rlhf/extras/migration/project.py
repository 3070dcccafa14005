"""The directory that ``new --from-trl`` writes: a configuration, what it lacks, and a place for reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.extras.migration.trl import converted, read_options, trainer_of
from lightning_rlhf.extras.schema.known import SCHEMA

_REWARD = '''"""Reward functions, as TRL calls them: lists of completions and of each column of the data."""

'''
_FUNCTION = '''
def {name}(completions, **columns):
    """Return a number for each completion."""
    raise NotImplementedError("write the reward {name}")
'''


def write_from_trl(file: Path, directory: Path, trainer: str | None, devices: int) -> str:
    """Write a configuration with the options of TRL of a file; return what to print.

    Args:
        file: JSON or YAML file.
        directory: empty directory.
        trainer: trainer of TRL, such as ``grpo``; None reads it from the options.
        devices: number of processes of the run of TRL.

    Raises:
        UsageError: the file cannot be read, or does not show its trainer.
    """
    options = read_options(file)
    trainer = trainer or trainer_of(options)
    config, left = converted(options, trainer, devices)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"# {line}" for line in _comment(file.name, trainer, left)]
    text = yaml.safe_dump(config, sort_keys=False, width=120)
    head = f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
    (directory / "run.yaml").write_text("\n".join([head, *lines, text]), encoding="utf-8")
    if names := _own_functions(config):
        functions = "\n".join(_FUNCTION.format(name=name) for name in names)
        (directory / "reward.py").write_text(_REWARD + functions, encoding="utf-8")
    carried = "everything was carried over" if not left else "not carried over:\n  " + "\n  ".join(left)
    commands = [f"  lightning-rlhf {command} --config run.yaml" for command in ("check-data", "fit")]
    origin = f"from the options of TRL's {trainer.upper()} trainer"
    return "\n".join([f"wrote {directory}/run.yaml {origin}", carried, "", f"  cd {directory}", *commands])


def _comment(name: str, trainer: str, left: Sequence[str]) -> list[str]:
    """Return the first lines of the configuration."""
    lines = [f"From {name}, options of TRL's {trainer.upper()} trainer, by lightning-rlhf new --from-trl."]
    return [*lines, "Not carried over:", *(f"  {line}" for line in left)] if left else lines


def _own_functions(config: dict[str, Any]) -> list[str]:
    """Return the names of the reward functions that the project must have."""
    functions = [
        str(reward["function"])
        for callback in config["trainer"]["callbacks"]
        for reward in callback["init_args"].get("rewards", ())
    ]
    return [name.removeprefix("reward.py:") for name in functions if name.startswith("reward.py:")]
