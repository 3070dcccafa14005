"""Interface of a sandbox: limits, results, and errors of the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_rlhf.expected_errors import RunError, UsageError

_MINIMA = {
    "seconds": 0.1,
    "memory_bytes": 64 * 2**20,
    "output_bytes": 1,
    "scratch_bytes": 2**12,
    "processes": 1,
    "files": 16,
}


class SandboxUnavailable(RunError):
    """No sandbox works on this machine; the message contains the remedy."""


class SandboxFault(RunError):
    """The sandbox failed, not the program in it; the program's result is unknown."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Args:
        seconds: wall-clock time, including the start of the interpreter.
        memory_bytes: address space of each process.
        output_bytes: size of stdout and of stderr, each; a program that writes more is killed.
        scratch_bytes: total size of the files in the program's /tmp, also the limit of a single file.
        processes: largest number of processes and threads.
        files: largest number of open files of each process.
    """

    seconds: float = 4.0
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 64 * 2**10
    scratch_bytes: int = 16 * 2**20
    processes: int = 8
    files: int = 64

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if not getattr(self, name) >= minimum:
                raise UsageError(f"limits.{name} must be at least {minimum}, got {getattr(self, name)}")


@dataclass(frozen=True)
class ProgramResult:
    """Result of running a program.

    Args:
        stdout: text written to stdout, at most ``output_bytes``; bytes that are not UTF-8 are replaced.
        stderr: text written to stderr, in the same way.
        exit_code: exit code, None if the program was killed.
        timed_out: whether it was still running after ``seconds``.
        truncated: whether it wrote more than ``output_bytes``.
        seconds: wall-clock time that it ran.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted Python programs."""

    def check(self) -> str:
        """Test the sandbox with a known program.

        Returns:
            A description in one line.

        Raises:
            SandboxUnavailable: the sandbox does not work here, or does not isolate.
        """

    def run(self, source: str, stdin: str, limits: Limits) -> ProgramResult:
        """Run a program until it ends or exceeds its limits; may be called from several threads at a time.

        Args:
            source: Python source code.
            stdin: the program's input.
            limits: resource limits.

        Raises:
            SandboxFault: the program's result is unknown.
        """
