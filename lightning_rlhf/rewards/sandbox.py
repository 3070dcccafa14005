"""What running a stranger's program means: limits, what came of it, and the faults that are not the program's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class SandboxUnavailable(RuntimeError):
    """This machine has no sandbox that works; the message says what to do."""


class SandboxFault(RuntimeError):
    """The sandbox failed, not the program in it: nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Args:
        seconds: of the wall clock, interpreter start included.
        memory_bytes: address space of each of its processes.
        output_bytes: of stdout and of stderr, each; a program that writes more is ended.
        scratch_bytes: of all files in its own /tmp, and of any one file.
        processes: processes and threads at a time.
        files: open at a time in each process.
    """

    seconds: float = 4.0
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 64 * 2**10
    scratch_bytes: int = 16 * 2**20
    processes: int = 8
    files: int = 64

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 0.1),
            ("memory_bytes", 64 * 2**20),
            ("output_bytes", 1),
            ("scratch_bytes", 2**12),
            ("processes", 1),
            ("files", 16),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"limits.{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Finished:
    """What came of a program.

    Args:
        stdout: what it wrote, at most ``output_bytes``; bytes that are no UTF-8 are replaced.
        stderr: likewise.
        exit_code: None if it was ended from outside.
        timed_out: it was still running after ``seconds``.
        truncated: it wrote more than it may.
        seconds: how long it ran.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


@runtime_checkable
class Sandbox(Protocol):
    """Runs Python programs that nobody has read."""

    def check(self) -> str:
        """Try the sandbox with a program of our own.

        Returns:
            What it is, in a line.

        Raises:
            SandboxUnavailable: it does not work here, or does not keep what it promises.
        """

    def run(self, source: str, stdin: str, limits: Limits) -> Finished:
        """Run a program to its end or to its limits. May be called from several threads at a time.

        Args:
            source: Python.
            stdin: what the program reads.
            limits: what it may use.

        Raises:
            SandboxFault: nothing is known about the program.
        """


def probe() -> list[tuple[str, str, str]]:
    """Which sandboxes work here, for ``doctor``.

    Returns:
        Name, finding, and fault for each; the fault is empty where nothing is wrong. That there is none is no fault:
        code rewards refuse to start then, and nothing else needs one.
    """
    from lightning_rlhf.rewards.sandbox_bubblewrap import BubblewrapSandbox, find_bwrap

    if find_bwrap() is None:
        return [("bubblewrap", "not installed; code rewards need it, or a remote sandbox", "")]
    try:
        return [("bubblewrap", BubblewrapSandbox().check(), "")]
    except SandboxUnavailable as reason:
        return [("bubblewrap", "does not work", str(reason))]
