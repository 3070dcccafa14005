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
_STALE_LOCK_SECONDS = 900.0  # builds take minutes; on a shared file system another machine may hold the lock


def build_folders(name: str) -> list[Path]:
    """Return the build folders of an extension for this version of Python.

    Args:
        name: name of the extension, such as ``deepspeed_shm_comm``.
    """
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if directory is not None:
        return [Path(directory) / name]
    from torch.utils.cpp_extension import get_default_build_root  # slow to import and rarely needed

    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return [folder / name for folder in Path(get_default_build_root()).glob(f"{python}*")]


def optimizer_extensions(make: Callable[..., Any]) -> list[str]:
    """Return the names of the extensions that DeepSpeed compiles when an optimizer is constructed.

    Args:
        make: optimizer class, or a ``functools.partial`` of it. Other factories are not inspected.
    """
    parts = (make, getattr(make, "func", None), *getattr(make, "args", ()))
    if any(getattr(part, "__name__", "") == "DeepSpeedCPUAdam" for part in parts):
        return ["cpu_adam"]
    return []


def await_builds(names: Iterable[str], is_first: bool) -> None:
    """Log which extensions must be compiled, and wait for builds of other processes.

    torch creates a file named ``lock`` during a build and waits for its removal without a timeout. An interrupted
    build leaves the file behind.

    Args:
        names: names of the extensions.
        is_first: whether this process logs; True in one process per machine.

    Raises:
        RuntimeError: a lock is older than 15 minutes and not open in any process of this machine.
    """
    for name in names:
        folders = build_folders(name)
        for lock in [folder / "lock" for folder in folders]:
            _await(lock, is_first)
        if is_first and not any((folder / f"{name}.so").exists() for folder in folders):
            log.info("DeepSpeed compiles its extension %s, once per machine; this takes minutes.", name)


def _await(lock: Path, is_first: bool) -> None:
    logged = False
    while lock.exists() and not is_open(lock):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # removed by the end of its build
            return
        if age > _STALE_LOCK_SECONDS:
            raise RunError(
                f"DeepSpeed's extension cannot be built: the lock {lock} is {age / 60:.0f} minutes old and not held by "
                f"a process of this machine, so an earlier build was interrupted. Remove it: rm {lock}"
            )
        if is_first and not logged:
            log.warning(
                "Waiting for the lock %s, which is not held by a process of this machine. If no other machine is "
                "building DeepSpeed's extension, an earlier build was interrupted; remove the lock: rm %s",
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
        except (PermissionError, FileNotFoundError, ProcessLookupError):  # another user's process, or it has ended
            continue
        for link in links:
            try:
                if os.readlink(link) == target:
                    return True
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                continue
    return False
