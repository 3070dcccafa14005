"""Checkpoints written during training: copies in host memory, one thread, and a separate process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints.role_files import RoleState

_TIMEOUT = timedelta(days=1)  # a copy to another machine has no time limit; dead ranks are detected


@dataclass(frozen=True)
class SaveOptions:
    """Options of saving a checkpoint.

    Args:
        keep: number of versions to keep, at least 1.
        background: whether to copy the roles to host memory and write them while training continues. The next save
            and the end of the run wait for it.
        published: function called on rank 0 with the folder of each published version.
        above: number that new versions exceed, because a remote copy has versions up to it.
    """

    keep: int = 1
    background: bool = False
    published: Callable[[Path], None] | None = None
    above: int = 0


class BackgroundSave:
    """Runs one save at a time in a thread; :meth:`join` raises its error."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._group: Any = None

    def start(self, work: Callable[[], None]) -> None:
        """Run a function in the thread; call :meth:`join` before the next one. All ranks.

        Args:
            work: function that uses only the collectives in :mod:`lightning_rlhf.strategies.ranks`.
        """
        self._executor = self._executor or ThreadPoolExecutor(1, "checkpoint")
        group = self.group()
        # warnings.catch_warnings affects all threads, so the thread cannot use it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._running = self._executor.submit(self._run, work, group)

    def group(self) -> Any:
        """Return the group of the thread's collectives, which must not mix with those of training. All ranks.

        The ranks wait for copies to and from other machines in it, which may take hours.
        """
        if self._group is None and ranks.is_distributed():
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return self._group

    def join(self, wait: bool = True) -> None:
        """Wait for the function and raise its error.

        Args:
            wait: whether to wait; False returns at once if the function is still running.
        """
        if self._running is not None and (wait or self._running.done()):
            futures.wait([self._running])  # if a signal interrupts this, _running is kept for the next call
            running, self._running = self._running, None
            running.result()

    def _run(self, work: Callable[[], None], group: Any) -> None:
        with ranks.over(group):
            work()


def in_host_memory(state: RoleState, tensors: bool = True) -> RoleState:
    """Return a copy of a role's state in host memory, which training does not change.

    Args:
        state: this rank's part of the role's state.
        tensors: whether to copy tensors; False if another rank writes the same ones.
    """
    if state.copied:
        return state
    copied = {}
    if tensors:
        copied = {key: tensor.to("cpu", copy=True) for key, tensor in state.tensors.items()}
    return RoleState(copied, state.settings)
