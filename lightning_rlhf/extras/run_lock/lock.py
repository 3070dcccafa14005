"""The lock of a run's directory, so that two runs do not write to it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer

from lightning_rlhf.callbacks.records.run_reader import RunMeter
from lightning_rlhf.cli.earlier_run import LOCK
from lightning_rlhf.expected_errors import UsageError

log = logging.getLogger(__name__)
_locks: dict[Path, tuple[BaseFileLock, int]] = {}  # that this process has, with the inode of the file, by its path


def lock_run(directory: Path) -> None:
    """Lock a directory, which is created; do nothing if this process has its lock, which ends with the process.

    A file system without locks is logged.

    Raises:
        UsageError: another process has the lock.
    """
    path = (directory / LOCK).absolute()
    if path in _locks and _inode(path) == _locks[path][1]:
        return
    unlock_run(directory)  # of an earlier run, whose directory has another name now
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except Timeout:
        raise UsageError(
            f"{_owner(path)} writes to {directory}: wait until it has ended, or set another trainer.default_root_dir"
        ) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): start no second run in it", directory, error.strerror)
    _locks[path] = lock, _inode(path)


def unlock_run(directory: Path) -> None:
    """Unlock a directory if this process has its lock."""
    path = (directory / LOCK).absolute()
    if path in _locks:
        lock, inode = _locks.pop(path)
        if inode == _inode(path):  # else the directory was renamed, and the file at its path may be another run's
            path.unlink(missing_ok=True)
        lock.release()


def _inode(path: Path) -> int:
    """Return the inode of a file; 0 without one."""
    return path.stat().st_ino if path.exists() else 0


def _owner(path: Path) -> str:
    """Return which process has a lock, as it has written into its file."""
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"


def _ignored_processes(world_size: int) -> str:
    """Return the variable of a launcher that says there are several processes, where there is one; empty otherwise.

    Each of them would train alone, and all would write to one directory.
    """
    size = os.environ.get("WORLD_SIZE", "")
    return size if world_size == 1 and size.isdecimal() and int(size) > 1 else ""


class RunLock(RunMeter):
    """Locks the run's directory while a run writes to it; before RolloutLoop, whose engine writes its log there."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Lock the directory.

        Raises:
            UsageError: another process has the lock.
        """
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            if size := _ignored_processes(trainer.world_size):
                log.warning(
                    "WORLD_SIZE is %s, but this run has one process: Lightning reads it from torchrun and SLURM only. "
                    "Start the run with torchrun, or set trainer.devices; or unset WORLD_SIZE and RANK",
                    size,
                )
            lock_run(Path(trainer.default_root_dir))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unlock the directory."""
        if stage == "fit":
            unlock_run(Path(trainer.default_root_dir))
