"""What becomes of a run that lies where a new one is to be written."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

log = logging.getLogger("lightning_rlhf")


def set_aside(directory: Path) -> Path | None:
    """Rename the directory of an earlier run, and say so: nothing is lost, nothing is mixed.

    Args:
        directory: of the run to come.

    Returns:
        Where the earlier run is now; None if there was none.
    """
    if not (directory / "config.yaml").is_file():
        return None
    number = next(n for n in itertools.count(1) if not directory.with_name(f"{directory.name}-{n}").exists())
    earlier = directory.rename(directory.with_name(f"{directory.name}-{number}"))
    log.info("An earlier run of %s is now %s.", directory, earlier)
    if (earlier / "export").is_dir():
        log.info("Until this run has ended there is no %s; the earlier one is in %s.", directory / "export", earlier)
    return earlier


def put_back(earlier: Path, directory: Path) -> None:
    """Let an earlier run have its place again, because the new one never began.

    Args:
        earlier: where it is now.
        directory: where it was.
    """
    shutil.rmtree(directory, ignore_errors=True)
    earlier.rename(directory)
    log.info("This run did not begin: the earlier one is %s again.", directory)


def check_can_be_written(directory: Path, fresh: bool) -> None:
    """Refuse a directory in which a run could not write.

    Args:
        directory: of the run to come.
        fresh: whether an earlier run in it is to be renamed.

    Raises:
        ValueError: it is a file, or permission is missing.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"trainer.default_root_dir {str(directory)!r} is a file: give a directory")
    path = directory.absolute()
    needed = [next(place for place in (path, *path.parents) if place.exists())]
    if fresh and (directory / "config.yaml").is_file():
        needed.append(path.parent)
    for place in needed:
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(
                f"trainer.default_root_dir is {str(directory)!r}, and there is no permission to write in {place}: "
                f"give another directory"
            )
    if not directory.exists():
        fault = None
        try:
            directory.mkdir(parents=True)
            directory.rmdir()
        except OSError as error:
            fault = error.strerror
        if fault is not None:
            raise ValueError(
                f"trainer.default_root_dir {str(directory)!r} cannot be made ({fault}): give another directory"
            )


def check_reads_elsewhere(config: Namespace, directory: Path) -> None:
    """Refuse a new run that reads what it would set aside.

    Args:
        config: of ``fit``, parsed.
        directory: of the run to come.

    Raises:
        ValueError: a model, tokenizer or data lie in it.
    """
    data = {name: value for name, value in config["data"]["init_args"].items() if name != "bad_rows"}
    for text in _texts([config["model"], data]):
        if "/" in text and os.path.exists(text) and Path(text).resolve().is_relative_to(directory.resolve()):
            raise ValueError(
                f"this run reads {text!r} and is to be written to {str(directory)!r}, where an earlier run lies that "
                f"would be set aside: give another trainer.default_root_dir, or go on with it by --ckpt_path last"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Namespace):
        yield from _texts(vars(value))
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
