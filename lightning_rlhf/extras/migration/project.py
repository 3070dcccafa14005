"""The directory that ``new --from-trl`` and ``--from-verl`` write: a configuration, and what it lacks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration import trl, verl
from lightning_rlhf.extras.migration.hydra import configuration_options
from lightning_rlhf.extras.migration.shell import overrides
from lightning_rlhf.extras.migration.trl import read_options
from lightning_rlhf.extras.schema.known import SCHEMA

_REWARD = '''"""Reward functions, as TRL calls them: lists of completions and of each column of the data.

With `messages: true` in its entry of run.yaml, a function gets lists of messages, as from TRL for conversational data.
"""

'''
_README = """# {title}

From {origin}, by `lightning-rlhf new`.

```bash
cd {directory}
{commands}
```

{left}

`docs/{docs}` says what each option of {program} is here. `lightning-rlhf fit --help` lists the options of
`run.yaml`, and `lightning-rlhf plan --config run.yaml` says whether the run fits into the memory of your GPUs.
"""
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
    doubts = trl.doubt_about(options) if trainer is None else []
    trainer = trainer or trl.trainer_of(options)
    with _value_errors(file):
        config, left = trl.converted(options, trainer, devices)
    origin = f"{file.name}, options of TRL's {trainer.upper()} trainer"
    return _write(directory, config, [*doubts, *left], origin, "TRL")


def write_from_verl(file: Path, directory: Path) -> str:
    """Write a configuration with the options of a script of verl, which is read and not executed; return what to print.

    Args:
        file: script of the shell that calls ``verl.trainer.main_ppo``, or a configuration of verl in YAML.
        directory: empty directory.

    Raises:
        UsageError: the file cannot be read, or has no options of verl.
    """
    if file.suffix in (".yaml", ".yml"):
        options, notes = configuration_options(file)
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        options, notes = overrides(text, file.parent)
        if notes and not options:
            raise UsageError(f"{file} has no options of verl; {notes[0]}")
    with _value_errors(file):
        config, left = verl.converted(options)
    return _write(directory, config, [*notes, *left], f"{file.name} of verl", "verl")


@contextmanager
def _value_errors(file: Path) -> Iterator[None]:
    """Raise a one-line error for a value that cannot be converted, such as a word where a number is expected."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} has a value that cannot be carried over: {error}") from error


def _write(directory: Path, config: dict[str, Any], left: Sequence[str], origin: str, program: str) -> str:
    """Write the project; return what to print."""
    directory.mkdir(parents=True, exist_ok=True)
    comment = [f"From {origin}, by lightning-rlhf new.", *(["Not carried over:"] if left else [])]
    lines = [f"# {line}" for line in [*comment, *(f"  {' '.join(line.split())}" for line in left)]]
    text = yaml.safe_dump(config, sort_keys=False, width=120)
    head = f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
    (directory / "run.yaml").write_text("\n".join([head, *lines, text]), encoding="utf-8")
    if names := _own_functions(config):
        functions = "\n".join(_FUNCTION.format(name=name) for name in names)
        (directory / "reward.py").write_text(_REWARD + functions, encoding="utf-8")
    carried = "everything was carried over" if not left else "not carried over:\n  " + "\n  ".join(left)
    commands = [f"  lightning-rlhf {command} --config run.yaml" for command in ("check-data", "fit")]
    home = shlex.quote(str(directory))
    values = {
        "title": directory.name, "origin": origin, "directory": home, "docs": f"options_of_{program.lower()}.md",
        "commands": "\n".join(command.strip() for command in commands), "program": program,
        "left": "\n".join(["Not carried over:", "", *(f"- {line}" for line in left)] if left else [f"{carried}."]),
    }  # fmt: skip
    (directory / "README.md").write_text(_README.format(**values), encoding="utf-8")
    return "\n".join([f"wrote {directory}/run.yaml from {origin}", carried, "", f"  cd {home}", *commands])


def _own_functions(config: dict[str, Any]) -> list[str]:
    """Return the names of the reward functions that the project must have."""
    functions = [
        str(reward["function"])
        for callback in config["trainer"].get("callbacks", ())
        for reward in callback["init_args"].get("rewards", ())
    ]
    return [name.removeprefix("reward.py:") for name in functions if name.startswith("reward.py:")]
