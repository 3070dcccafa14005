"""Renaming of an earlier run in the directory of a new run, so that its files are kept."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_rlhf.expected_errors import MissingFileError, UsageError

log = logging.getLogger("lightning_rlhf")
LOCK = "run.lock"
DIRECTORY = "runs/default"  # of a run without trainer.default_root_dir
_RECORD = ("config.yaml", "env.json", "end.json", "report.html", "health_settings.json", "loggers.json")


def rename_earlier_run(directory: Path) -> Path:
    """Rename the directory of an earlier run to the next free name with a number, and return its new path."""
    number = next(n for n in itertools.count(1) if not directory.with_name(f"{directory.name}-{n}").exists())
    renamed = directory.rename(directory.with_name(f"{directory.name}-{number}"))
    (renamed / LOCK).unlink(missing_ok=True)
    return renamed


def log_renamed_run(earlier: Path, directory: Path) -> None:
    """Log the new name of an earlier run."""
    log.info("An earlier run of %s is now %s.", directory, earlier)
    if (earlier / "export").is_dir():
        log.info("%s has no export until this run has ended; the earlier one is in %s.", directory, earlier)


def restore_earlier_run(earlier: Path, directory: Path) -> None:
    """Rename an earlier run back after a new run that did not start."""
    shutil.rmtree(directory, ignore_errors=True)
    earlier.rename(directory)


class RunRecord:
    """Files about a run that its next part writes before the first step, to restore them if that part never starts."""

    def __init__(self, directory: Path) -> None:
        paths = [directory / name for name in _RECORD]
        self._contents = {path: path.read_bytes() if path.is_file() else None for path in paths}

    def restore(self) -> None:
        """Write the files as they were, and remove those that did not exist."""
        for path, content in self._contents.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)


def check_writable(directory: Path, renames: bool) -> None:
    """Validate that a run can write to its directory, which is tried beside it: another node may just create it.

    Args:
        renames: whether an earlier run in it will be renamed.

    Raises:
        UsageError: the directory is a file, cannot be created, or permission is missing.
    """
    check_permission(directory, renames)
    if os.path.exists(directory):  # Path.exists() raises errors, such as of too long names
        return
    existing = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryDirectory(dir=existing) as tried:
            Path(tried, directory.relative_to(existing)).mkdir(parents=True, exist_ok=True)
        return
    except OSError as error:
        reason = error.strerror  # raised below, because errors of files in a chain count as faults of the run
    raise UsageError(
        f"trainer.default_root_dir {str(directory)!r} cannot be created ({reason}): set it to another directory"
    )


def check_permission(directory: Path, renames: bool) -> None:
    """Validate that a run's directory is not a file, and that there is permission to write to it.

    Args:
        renames: whether an earlier run in it will be renamed.

    Raises:
        UsageError: the directory is a file, or permission is missing.
    """
    if os.path.exists(directory) and not directory.is_dir():
        raise UsageError(f"trainer.default_root_dir {str(directory)!r} is a file: set it to a directory")
    path = directory.absolute()
    needed = [next(folder for folder in (path, *path.parents) if os.path.exists(folder))]
    if renames:
        needed.append(path.parent)
    for folder in needed:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"no permission to write in {folder}, which trainer.default_root_dir {str(directory)!r} needs: "
                f"set it to another directory"
            )


def found_checkpoint(path: str | None, directory: Path) -> str | None:
    """Return the path of a checkpoint that exists; ``best`` is the run's own.

    Args:
        path: path or URL, one of the names that Lightning knows, or None.
        directory: directory of the run.

    Raises:
        MissingFileError: there is none.
    """
    if path == "best":
        path = str(directory / "checkpoints/best.ckpt")
    if path in (None, "last", "hpc", "registry", "null") or "://" in path or Path(path).expanduser().exists():
        return path
    others = ", ".join(sorted(map(str, (directory / "checkpoints").glob("*.ckpt"))))
    raise MissingFileError(f"no checkpoint at {path}{f'; there is {others}' if others else ''}")


def check_reads_elsewhere(config: Namespace, directory: Path) -> None:
    """Validate that a new run does not read from the earlier run that it renames.

    Raises:
        UsageError: a model, tokenizer or data are in the directory.
    """
    data = {name: value for name, value in config["data"]["init_args"].items() if name != "bad_rows"}
    for text in _strings([config["model"], data]):
        if "/" in text and os.path.exists(text) and Path(text).resolve().is_relative_to(directory.resolve()):
            raise UsageError(
                f"this run reads {text!r}, but the earlier run in {str(directory)!r} would be renamed: set another "
                f"trainer.default_root_dir, or resume the earlier run with --ckpt_path last"
            )


def _strings(value: Any) -> Iterator[str]:
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)
