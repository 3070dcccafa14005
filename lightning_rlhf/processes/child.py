"""A child process of this one: its environment, its process group, its log, its end, and words for its exit.

This file imports only the standard library, so that workers start fast. A new supervised process takes about 40 lines,
such as ``tests/processes/example.py``, which is started, asked, reported if it dies, and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# Prefixes of the variables that torchrun, SLURM and MPI set for the processes of a run.
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")
# With a launcher's variables a child would join the trainer's torch.distributed group. Preloaded libraries, such as an
# allocator, are those that the trainer needs.
_OF_THE_TRAINER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD",
)  # fmt: skip
_MOST_SOCKET_PATH_BYTES = 107  # of Linux
_SOCKET_NAME_BYTES = 37  # of vLLM: a slash and a UUID
_TAIL_CHARACTERS = 2000
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_LAUNCHER = "LIGHTNING_RLHF_LAUNCHER"  # variable with the id of the process that starts the ranks of a machine


class Child(subprocess.Popen[bytes]):
    """A process in its own session: Ctrl-C does not reach it, and it can be killed with all that it started.

    Args:
        command: program and arguments.
        environment: all of its variables, see :func:`inherited_environment`; None: the same as of this process.
        log: file for its output, whose folder is created; None: ``options`` have ``stdout`` and ``stderr``.
        append: whether the log keeps the output of an earlier process.
        **options: further options of ``subprocess.Popen``. Without ``stdin`` it reads nothing.

    Raises:
        OSError: the log cannot be written, or the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        append: bool = False,
        **options: Any,
    ) -> None:
        self.log = log
        with contextlib.ExitStack() as files:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                options["stdout"] = files.enter_context(log.open("ab" if append else "wb"))
                options["stderr"] = subprocess.STDOUT
            options = {"stdin": subprocess.DEVNULL, **options, "start_new_session": True}
            super().__init__(command, env=environment, **options)

    def signal_group(self, number: int) -> bool:
        """Send a signal to the process and to all that it started in its session; return whether any of them exists."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill_group(self) -> int:
        """Kill the process and all that it started in its session; return its exit code."""
        self.signal_group(signal.SIGKILL)
        return self.wait()

    def end(self, seconds: float, grace: float = 0.0) -> int:
        """Wait for the end of a process that was asked to end, then kill what is left of its group.

        To ask by a signal, call ``signal_group(signal.SIGTERM)`` before.

        Args:
            seconds: longest wait.
            grace: longest further wait for the processes that it started, so that they can clean up.

        Returns:
            The exit code.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
            deadline = time.monotonic() + grace
            while self.signal_group(0) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        return self.kill_group()

    def log_tail(self) -> str:
        """Return the end of the log; empty if there is none."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * _TAIL_CHARACTERS))  # a character has at most 4 bytes
            return file.read().decode(errors="replace")[-_TAIL_CHARACTERS:].strip()
        return ""


def inherited_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of this process without those of launchers, preloaded libraries and further ones."""
    left_out = {*_OF_THE_TRAINER, *without}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith(LAUNCHER_PREFIXES)
    }


def describe_exit(code: int) -> str:
    """Describe an exit code of ``subprocess``, such as ``exit code 3`` or ``killed by signal 15 (SIGTERM)``."""
    if code >= 0:
        return f"exit code {code}"
    names = {member.value: member.name for member in signal.Signals}
    cause = ", often because memory ran out" if code == -signal.SIGKILL else ""
    return f"killed by signal {-code} ({names.get(-code, 'unnamed')}){cause}"


def bytes_too_long(directory: str | Path) -> int:
    """Return how many bytes too long the paths of vLLM's sockets in a directory would be; not positive if they fit."""
    return len(os.fsencode(directory)) + _SOCKET_NAME_BYTES - _MOST_SOCKET_PATH_BYTES


def end_with_parent(sent: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends; 0: none. In the child; Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)


def end_with_launcher(is_first: bool, is_loading: bool) -> None:
    """Have this rank end with the process that started it, while it loads; the failure watch sees to that afterwards.

    torchrun and SLURM end their ranks.

    Args:
        is_first: whether this is the first process of the machine, which starts the other ranks: they then do so.
    """
    if is_first:
        os.environ[_LAUNCHER] = str(os.getpid())
    elif (launcher := os.environ.get(_LAUNCHER)) and sys.platform == "linux":
        end_with_parent(signal.SIGKILL if is_loading else 0)
        if is_loading and not Path("/proc", launcher).exists():  # it ended before this line
            sys.exit(1)
