"""Checkpoints written during training: copies in host memory, one thread, and a separate process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints.role_files import RoleState


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved.

    Args:
        keep: versions to keep, at least 1.
        background: copy the roles to host memory and write them while training continues. Costs that copy; the next
            save, and the end of the run, wait for it.
        published: called on rank 0 with the folder of a version once it counts.
        above: number that new versions exceed, because a copy elsewhere has versions up to it.
    """

    keep: int = 1
    background: bool = False
    published: Callable[[Path], None] | None = None
    above: int = 0


class BackgroundSave:
    """At most one save at a time, in a thread whose failure is raised by the next call."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._group: Any = None

    def start(self, work: Callable[[], None]) -> None:
        """Run a function in the thread. All ranks, and not before :meth:`finish`.

        Args:
            work: exchanges values through :mod:`lightning_rlhf.strategies.ranks` only.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
            # The thread's collectives would otherwise mix with those of training.
            self._group = dist.new_group(backend="gloo") if ranks.is_distributed() else None
        # warnings.catch_warnings changes all threads at once, so the thread cannot use it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._running = self._executor.submit(self._run, work)

    def finish(self, wait: bool = True) -> None:
        """Wait for the function, and raise its error.

        Args:
            wait: False returns at once where the work is not done yet.
        """
        if self._running is not None and (wait or self._running.done()):
            futures.wait([self._running])  # a signal may end this wait, and the next one still has the work
            running, self._running = self._running, None
            running.result()

    def _run(self, work: Callable[[], None]) -> None:
        with ranks.over(self._group):
            work()


def in_host_memory(state: RoleState, tensors: bool = True) -> RoleState:
    """Return a copy of a role's state in host memory, which training does not change.

    Args:
        state: this rank's part.
        tensors: False leaves out the tensors, where another rank writes the same ones.
    """
    if state.copied:
        return state
    copied = {key: tensor.to("cpu", copy=True) for key, tensor in state.tensors.items()} if tensors else {}
    return RoleState(copied, state.settings)
