"""Preparation of worker processes for user code: environment variables, bounded output, and the end of descendants.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from lightning_rlhf.launch_environment import LAUNCHER_PREFIXES

# A function that uses torch.distributed would otherwise join the trainer's process group.
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD",
)  # fmt: skip
_MAX_OUTPUT = 10_000  # characters that one call may print
_PR_SET_CHILD_SUBREAPER = 36
SCAN_SECONDS = 0.25  # between two scans for processes that a worker started
# Variables with the process ids of the trainer and of a worker, which their descendants inherit.
_TRAINER, _WORKER = "LIGHTNING_RLHF_TRAINER", "LIGHTNING_RLHF_WORKER"
_ORPHAN_PASSES = 5
_CLOCK_TOLERANCE = 0.05  # seconds; start times of processes are known to 0.01
_EXIT_CODE_FOR_0 = 97  # replaces a worker's exit code 0, after which the pool would wait until the time limit


def mark_trainer() -> None:
    """Mark the environment of this process, which its workers and their descendants inherit."""
    os.environ[_TRAINER] = str(os.getpid())


def describe_exit(code: int) -> str:
    """Describe the exit code of a worker process."""
    if code < 0:
        return f"killed by signal {-code}"
    return f"exit code {0 if code == _EXIT_CODE_FOR_0 else code}"


# -- the following runs in a worker process ------------------------------------------------------------------


def prepare_worker() -> None:
    """Prepare this process, which has just started, to run user code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's handler would wait for a call to return
    _replace_exit_code_0()
    os.environ[_WORKER] = str(os.getpid())
    if sys.platform == "linux":
        _start_guard(os.getpid(), os.getppid())
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout = BoundedOutput(sys.stdout)
    sys.stderr = BoundedOutput(sys.stderr)


def begin_call() -> None:
    """Reset the limit of the output for another call; does nothing outside of a worker process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BoundedOutput):
            stream.remaining = _MAX_OUTPUT


def _replace_exit_code_0() -> None:
    """Replace this process's exit code 0, which the pool would consider a regular end."""
    worker, original_exit = os.getpid(), os._exit

    def exit_process(status: int) -> None:
        original_exit(status or _EXIT_CODE_FOR_0 if os.getpid() == worker else status)

    os._exit = exit_process  # type: ignore[assignment]


def _start_guard(worker: int, trainer: int) -> None:
    """Fork a guard process that kills everything the worker started when the worker or the trainer ends.

    The worker adopts orphaned processes, also those in other sessions, so that all remain its descendants; the guard
    records them.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork():
        return
    ends = [os.pidfd_open(worker), os.pidfd_open(trainer)]
    os.closerange(0, min(ends))  # an inherited pipe end would keep the pipe open after the worker has ended
    os.closerange(max(ends) + 1, os.sysconf("SC_OPEN_MAX"))
    descendants: dict[int, int] = {}
    scanned = time.clock_gettime(time.CLOCK_BOOTTIME)
    while not select.select(ends, [], [], SCAN_SECONDS)[0]:
        scanned = time.clock_gettime(time.CLOCK_BOOTTIME)
        _record_descendants(worker, descendants)
    trainer_ended = bool(select.select([ends[1]], [], [], 0)[0])
    _record_descendants(worker, descendants)
    for process in list(descendants):
        _record_descendants(process, descendants)
    for descriptor in descendants.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    if trainer_ended:
        _remove_semaphores()
    else:
        _kill_orphans(worker, trainer, scanned - _CLOCK_TOLERANCE)
    os.killpg(worker, signal.SIGKILL)  # includes the guard


def _record_descendants(root: int, descriptors: dict[int, int]) -> None:
    """Open a process descriptor of every descendant of a process, and close those of processes that have ended.

    Args:
        root: process id.
        descriptors: process descriptors by process id; changed in place.
    """
    for process, descriptor in list(descriptors.items()):
        if select.select([descriptor], [], [], 0)[0]:
            os.close(descriptors.pop(process))
    pending = [root]
    while pending:
        for children in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                for process in map(int, children.read_text().split()):
                    if process != os.getpid():
                        pending.append(process)
                        if process not in descriptors:
                            descriptors[process] = os.pidfd_open(process)


def _kill_orphans(worker: int, trainer: int, since: float) -> None:
    """Kill descendants of a worker that has ended which were started too late to be recorded.

    They no longer descend from the trainer. Programs that they started have the worker's id in their environment;
    other processes have the environment with which the trainer started the worker, and the worker's command line.

    Args:
        worker: process id of the worker.
        trainer: process id of the trainer.
        since: seconds since the machine's start, at which the last record began.
    """
    of_worker, of_trainer = f"{_WORKER}={worker}".encode(), f"{_TRAINER}={trainer}".encode()
    command = Path("/proc/self/cmdline").read_bytes()  # this process is a copy of the worker
    for _ in range(_ORPHAN_PASSES):  # a process may start others before it is killed
        processes = _processes()
        orphans = [
            process
            for process, (_, start) in processes.items()
            if start >= since and process != os.getpid() and not _descends(process, trainer, processes)
        ]
        killed = 0
        for process in orphans:
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                descriptor = os.pidfd_open(process)
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                is_copy = of_trainer in variables and Path(f"/proc/{process}/cmdline").read_bytes() == command
                if of_worker in variables or is_copy:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed += 1
                os.close(descriptor)
        if not killed:
            return
        time.sleep(_CLOCK_TOLERANCE)


def _processes() -> dict[int, tuple[int, float]]:
    """Return the parent of each process, and its start in seconds since the machine's start."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *rest = path.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":  # it has not ended
                processes[int(path.parent.name)] = int(parent), int(rest[17]) / ticks
    return processes


def _descends(process: int, ancestor: int, processes: Mapping[int, tuple[int, float]]) -> bool:
    """Return whether a process is a descendant of another one."""
    while process in processes:
        process = processes[process][0]
        if process == ancestor:
            return True
    return False


def _remove_semaphores() -> None:
    """Remove the named semaphores that this process shares with a killed trainer.

    multiprocessing's resource tracker does so unless it was killed together with the trainer's process group.
    """
    mapped = Path("/proc/self/maps").read_text()
    for name in set(re.findall(r"/dev/shm/(sem\.mp-\w+)$", mapped, re.MULTILINE)):
        (Path("/dev/shm") / name).unlink(missing_ok=True)


class BoundedOutput(io.TextIOBase):
    """A text stream that drops output beyond a limit per call.

    Args:
        stream: stream that receives the output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.remaining = _MAX_OUTPUT

    def write(self, text: str) -> int:
        """Write the part of the text within the limit."""
        if self.remaining > 0:
            self._stream.write(text[: self.remaining])
            self.remaining -= len(text)
            if self.remaining <= 0:
                self._stream.write("\n[this call printed too much; the rest of its output is omitted]\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._stream.fileno()
