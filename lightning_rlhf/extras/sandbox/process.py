"""Communication with a process under limits of time and output."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from lightning_rlhf.processes.child import Child

_CHUNK_BYTES = 2**16


@dataclass
class ProcessResult:
    """Output and end of a process.

    Args:
        output: bytes read from each pipe, by name.
        exit_code: exit code, None if the process was killed.
        timed_out: whether it was still running at its time limit.
        truncated: whether it wrote more than allowed.
        seconds: wall-clock time that it ran.
    """

    output: dict[str, bytearray]
    exit_code: int | None = None
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0
    _start: float = field(default_factory=time.monotonic)

    def remaining(self, limit: float) -> float:
        """Return the seconds until the limit, at least 0."""
        return max(0.0, limit - (time.monotonic() - self._start))


def communicate(
    process: Child,
    stdin: bytes,
    extra_pipes: dict[str, IO[bytes]],
    seconds: float,
    output_bytes: int,
) -> ProcessResult:
    """Write a process's input, read its output, and kill it when it exceeds a limit.

    Args:
        process: process that was just started, unbuffered, with pipes as its stdin, stdout and stderr.
        stdin: input of the process; the part that it does not read is dropped.
        extra_pipes: further pipes to read, by name. Their end of file is not awaited, because a process that outlives
            this one may keep them open. They are closed at the end.
        seconds: time limit.
        output_bytes: largest size of stdout and of stderr.

    Returns:
        The result; the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = {"stdout": process.stdout, "stderr": process.stderr, **extra_pipes}
    result = ProcessResult({name: bytearray() for name in pipes})
    unsent = memoryview(stdin)
    with process, ExitStack() as files, selectors.DefaultSelector() as selector:
        files.callback(kill_session, process)
        for name, pipe in pipes.items():
            files.enter_context(pipe)
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, name)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        while any(key.data in ("stdout", "stderr") for key in selector.get_map().values()):
            ready = selector.select(result.remaining(seconds))
            if not result.remaining(seconds):
                result.timed_out = True
                break
            for key, _ in ready:
                if key.data == "stdin":
                    unsent = _write(key.fd, unsent)
                    finished = not unsent
                else:
                    finished = _read(key.fd, result.output[key.data])
                    result.truncated |= key.data not in extra_pipes and len(result.output[key.data]) > output_bytes
                if finished:
                    selector.unregister(key.fileobj)
                    if key.data == "stdin":
                        process.stdin.close()
            if result.truncated:
                break
        _wait_or_kill(process, result, seconds)
        for name, pipe in extra_pipes.items():
            _read(pipe.fileno(), result.output[name])
    for name in ("stdout", "stderr"):
        del result.output[name][output_bytes:]
    return result


def kill_session(process: Child) -> None:
    """Kill a process that leads a session, and its children in the session.

    During bubblewrap's setup, its ``--die-with-parent`` is not yet in effect, so its child would survive it.
    """
    if process.returncode is None:  # not yet waited for, so the process id cannot have been reused
        process.signal_group(signal.SIGKILL)


def _write(pipe: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(pipe, unsent[:_CHUNK_BYTES]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:  # the process has closed its stdin
        return unsent[:0]


def _read(pipe: int, buffer: bytearray) -> bool:
    """Append the available bytes to a buffer; return whether the pipe has reached its end."""
    try:
        chunk = os.read(pipe, _CHUNK_BYTES)
    except BlockingIOError:
        return False
    buffer += chunk
    return not chunk


def _wait_or_kill(process: Child, result: ProcessResult, seconds: float) -> None:
    if not (result.timed_out or result.truncated):
        try:
            result.exit_code = process.wait(result.remaining(seconds))
        except subprocess.TimeoutExpired:  # it has closed its output but still runs
            result.timed_out = True
    kill_session(process)
    process.wait()
    result.seconds = time.monotonic() - result._start
