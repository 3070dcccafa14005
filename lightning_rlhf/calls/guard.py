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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from lightning_rlhf.processes import child

_MAX_OUTPUT = 10_000  # characters that one call may print
_PR_SET_CHILD_SUBREAPER = 36
SCAN_SECONDS = 0.25  # between two scans for processes that a worker started
# Variables with the process ids of the trainer and of a worker, which their descendants inherit.
_TRAINER_VARIABLE, _WORKER_VARIABLE = "LIGHTNING_RLHF_TRAINER", "LIGHTNING_RLHF_WORKER"
_ORPHAN_PASSES = 5
_CLOCK_TOLERANCE = 0.05  # seconds; start times of processes are known to 0.01
_EXIT_CODE_FOR_0 = 97  # replaces a worker's exit code 0, after which the pool would wait until the time limit


def mark_trainer() -> None:
    """Mark the environment of this process, which its workers and their descendants inherit."""
    os.environ[_TRAINER_VARIABLE] = str(os.getpid())


def describe_exit(code: int) -> str:
    """Describe the exit code of a worker process."""
    return child.describe_exit(0 if code == _EXIT_CODE_FOR_0 else code)


# -- the following runs in a worker process ------------------------------------------------------------------


def prepare_worker() -> None:
    """Prepare this process, which has just started, to run user code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's handler would wait for a call to return
    _replace_exit_code_0()
    os.environ[_WORKER_VARIABLE] = str(os.getpid())
    if sys.platform == "linux":
        _start_guard(os.getpid(), os.getppid())
    for name in os.environ.keys() - child.inherited_environment().keys():
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout = BoundedOutput(sys.stdout)
    sys.stderr = BoundedOutput(sys.stderr)


def begin_call() -> None:
    """Reset the limit of the output for another call; does nothing outside of a worker process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BoundedOutput):
            stream.reset()


def _replace_exit_code_0() -> None:
    """Replace this process's exit code 0, which the pool would consider a regular end."""
    worker, original_exit = os.getpid(), os._exit

    def exit_process(status: int) -> None:
        if os.getpid() == worker and status == 0:
            status = _EXIT_CODE_FOR_0
        original_exit(status)

    os._exit = exit_process  # type: ignore[assignment]


class BoundedOutput(io.TextIOBase):
    """A text stream that drops output beyond a limit per call.

    Args:
        stream: stream that receives the output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        """Begin another call."""
        self._remaining = _MAX_OUTPUT
        self._has_notice = False

    def write(self, text: str) -> int:
        """Write the part of the text within the limit."""
        if self._remaining:
            self._stream.write(text[: self._remaining])
        if len(text) > self._remaining and not self._has_notice:
            self._stream.write("\n[this call printed too much; the rest of its output is omitted]\n")
            self._has_notice = True
        self._remaining = max(0, self._remaining - len(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._stream.fileno()


def _start_guard(worker: int, trainer: int) -> None:
    """Fork a guard process: when the worker or the trainer ends, it kills everything that the worker started.

    The worker becomes a subreaper: an orphaned descendant, even in another session, gets the worker as its parent. So
    the guard finds all of them under the worker.
    """
    os.setpgid(0, 0)  # a process group of worker, guard and plain forks
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = os.pidfd_open(worker), os.pidfd_open(trainer)
    if os.fork() == 0:
        try:
            _guard(worker, trainer, *watched)
        finally:
            os._exit(1)  # after an error, too: this copy of the worker must not call its functions
    for descriptor in watched:
        os.close(descriptor)


# -- the following runs in the guard process -----------------------------------------------------------------


def _guard(worker: int, trainer: int, worker_descriptor: int, trainer_descriptor: int) -> None:
    """Wait until the worker or the trainer ends, then kill all processes that the worker started, and this one.

    Args:
        worker: process id of the worker.
        trainer: process id of the trainer.
        worker_descriptor: process descriptor of the worker.
        trainer_descriptor: process descriptor of the trainer.
    """
    for name in os.listdir("/proc/self/fd"):  # inherited ends of pipes would keep these open after the worker's end
        if int(name) not in (worker_descriptor, trainer_descriptor):
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    descendants: dict[int, int] = {}
    scan_began = time.clock_gettime(time.CLOCK_BOOTTIME)
    while not _has_ended(worker_descriptor, trainer_descriptor, seconds=SCAN_SECONDS):
        scan_began = time.clock_gettime(time.CLOCK_BOOTTIME)
        _record_descendants(worker, descendants)
    trainer_has_ended = _has_ended(trainer_descriptor)
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker_descriptor, signal.SIGSTOP)  # starts no further processes
        # If the worker has ended, its children have another parent: search from each recorded descendant, too.
        for process in (worker, *descendants.copy()):
            _record_descendants(process, descendants)
        for descriptor in descendants.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if trainer_has_ended:  # then orphaned forks look like other workers, which no longer descend from the trainer
            _remove_semaphores()
        else:
            _kill_orphans(worker, trainer, scan_began - _CLOCK_TOLERANCE)
    finally:
        os.killpg(worker, signal.SIGKILL)  # includes the guard; a stopped worker must not stay


def _has_ended(*descriptors: int, seconds: float = 0) -> bool:
    """Wait for the end of any of some processes, and return whether one has ended.

    Args:
        *descriptors: process descriptors.
        seconds: longest wait.
    """
    poll = select.poll()  # unlike select, without a limit of descriptors
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _record_descendants(root: int, descendants: dict[int, int]) -> None:
    """Open a process descriptor of every descendant of a process, and close those of processes that have ended.

    Args:
        root: process id.
        descendants: process descriptors by process id; changed in place.
    """
    for process, descriptor in list(descendants.items()):
        if _has_ended(descriptor):
            os.close(descendants.pop(process))
    pending = [root]
    while pending:
        with contextlib.suppress(OSError):  # the parent has ended meanwhile
            for children in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                started = {int(process) for process in children.read_text().split()} - {os.getpid()}
                pending += started
                for process in started - descendants.keys():
                    with contextlib.suppress(OSError):  # this child has ended meanwhile
                        descendants[process] = os.pidfd_open(process)


def _kill_orphans(worker: int, trainer: int, since: float) -> None:
    """Kill the processes that an ended worker started after the last scan.

    - Processes that have executed a program have the worker's id in their environment.
    - Plain forks of the worker have its command line and the environment with which the trainer started it (/proc does
      not show later changes). Other workers and their forks have the same, but descend from the trainer. An orphan
      does only if the trainer adopts it, as the first process of a container does: the trainer is then its parent, and
      unlike a worker it is in another session, or in the dead worker's process group, which is killed as a whole.

    Args:
        worker: process id of the worker.
        trainer: process id of the trainer.
        since: seconds since the machine's start, at which the last scan began.
    """
    of_worker = f"{_WORKER_VARIABLE}={worker}".encode()
    of_trainer = f"{_TRAINER_VARIABLE}={trainer}".encode()
    command = Path("/proc/self/cmdline").read_bytes()  # this process is a copy of the worker
    for _ in range(_ORPHAN_PASSES):  # a process may start others before it is killed
        processes = _processes()
        killed = 0
        for process, (parent, session, start) in processes.items():
            if start < since or process == os.getpid():
                continue
            with contextlib.suppress(OSError), _opened(process) as descriptor:  # it has ended, or is another user's
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                is_like_worker = of_trainer in variables and Path(f"/proc/{process}/cmdline").read_bytes() == command
                is_adopted = parent == trainer and session != os.getsid(trainer)
                is_orphan = is_adopted or not _descends(process, trainer, processes)
                if of_worker in variables or (is_like_worker and is_orphan):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed += 1
        if not killed:
            return
        time.sleep(_CLOCK_TOLERANCE)


@contextlib.contextmanager
def _opened(process: int) -> Iterator[int]:
    """Open a process descriptor; meanwhile no other process gets the id."""
    descriptor = os.pidfd_open(process)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Process(NamedTuple):
    """Parent and session of a process, and its start in seconds since the machine's start."""

    parent: int
    session: int
    start: float


def _processes() -> dict[int, _Process]:
    """Return the processes that have not ended, by their ids."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Fields 3 state, 4 ppid, 6 session and 22 starttime; the text before field 3 may contain spaces.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                processes[int(path.parent.name)] = _Process(int(fields[1]), int(fields[3]), int(fields[19]) / ticks)
    return processes


def _descends(process: int, ancestor: int, processes: Mapping[int, _Process]) -> bool:
    """Return whether a process is a descendant of another one."""
    while process in processes:
        process = processes[process].parent
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
