"""Builds of DeepSpeed's C++ extensions: log lines, and removal of stale locks."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_rlhf.expected_errors import RunError

log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 900.0  # builds take minutes; on a shared file system another machine may hold the lock


def build_folders(name: str) -> list[Path]:
    """Return the folders in which torch builds, or has built, an extension for this Python.

    Args:
        name: name of the extension, such as ``deepspeed_shm_comm``.
    """
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if directory is not None:
        return [Path(directory) / name]
    from torch.utils.cpp_extension import get_default_build_root  # slow to import, and rarely needed

    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return [folder / name for folder in Path(get_default_build_root()).glob(f"{python}*")]


def optimizer_extensions(make: Callable[..., Any]) -> list[str]:
    """Return the names of the extensions that DeepSpeed compiles when an optimizer is made.

    Args:
        make: makes the optimizer: its class, or the ``functools.partial`` that a configuration becomes. The class that
            any other function makes is not known beforehand.
    """
    parts = (make, getattr(make, "func", None), *getattr(make, "args", ()))
    return ["cpu_adam"] if any(getattr(part, "__name__", "") == "DeepSpeedCPUAdam" for part in parts) else []


def await_builds(names: Iterable[str], is_first: bool) -> None:
    """Announce extensions that are to be built, and wait for those that another process builds.

    torch marks a build by a file ``lock`` and waits for its end without a limit, also where the build was killed.

    Args:
        names: names of the extensions.
        is_first: whether this process logs; one of a machine does.

    Raises:
        RuntimeError: a lock is older than 15 minutes, and no process of this machine has it open.
    """
    for name in names:
        folders = build_folders(name)
        for lock in [folder / "lock" for folder in folders]:
            _await(lock, is_first)
        if is_first and not any((folder / f"{name}.so").exists() for folder in folders):
            log.info("DeepSpeed compiles its extension %s for this machine, once; that takes minutes.", name)


def _await(lock: Path, is_first: bool) -> None:
    logged = False
    while lock.exists() and not is_open(lock):
        age = time.time() - lock.stat().st_mtime
        if age > _PATIENCE_SECONDS:
            raise RunError(
                f"DeepSpeed's extension cannot be built: {lock} is {age / 60:.0f} minutes old, and no process of this "
                f"machine holds it, so a build was interrupted. Remove it: rm {lock}"
            )
        if is_first and not logged:
            log.warning(
                "Waiting for %s, which no process of this machine holds. If no other machine is building DeepSpeed's "
                "extension now, an interrupted build left it: rm %s",
                *(lock, lock),
            )
            logged = True
        time.sleep(0.5)


def is_open(file: Path) -> bool:
    """Return whether any process of this user on this machine has a file open.

    Args:
        file: an existing file.
    """
    target = str(file.resolve())
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = list(descriptors.iterdir())
        except (PermissionError, FileNotFoundError, ProcessLookupError):  # another user's, or ended
            continue
        for link in links:
            try:
                if os.readlink(link) == target:
                    return True
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                continue
    return False
