"""A process that is fed, listened to, and ended at its limits."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

_CHUNK = 2**16


@dataclass
class Watched:
    """What a process said and how it ended.

    Args:
        output: of each pipe it writes to, by name.
        exit_code: None if it was ended from outside.
        timed_out: it was still running at the end of its time.
        truncated: it wrote more than it may.
        seconds: how long it ran.
    """

    output: dict[str, bytearray]
    exit_code: int | None = None
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def left(self, limit: float) -> float:
        """Seconds until the limit, at least 0."""
        return max(0.0, limit - (time.monotonic() - self._started))


def watch(
    process: subprocess.Popen[bytes], stdin: bytes, spared: dict[str, IO[bytes]], seconds: float, most: int
) -> Watched:
    """Feed a process, gather what it says, and kill it at its limits.

    Args:
        process: just started, unbuffered, with pipes as its stdin, stdout and stderr.
        stdin: all that it gets; what it does not read is dropped.
        spared: further pipes to read, by name, whose end is not waited for, because who holds one open may outlive the
            process. They are closed here.
        seconds: after which it is killed.
        most: bytes that it may write to stdout and to stderr.

    Returns:
        What came of it. The process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = {"stdout": process.stdout, "stderr": process.stderr, **spared}
    found = Watched({name: bytearray() for name in pipes})
    rest = memoryview(stdin)
    with process, ExitStack() as files, selectors.DefaultSelector() as selector:
        files.callback(end_all, process)
        for name, pipe in pipes.items():
            files.enter_context(pipe)
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, name)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        while any(key.data in ("stdout", "stderr") for key in selector.get_map().values()):
            ready = selector.select(found.left(seconds))
            if not found.left(seconds):
                found.timed_out = True
                break
            for key, _ in ready:
                if key.data == "stdin":
                    rest = _feed(key.fd, rest)
                    over = not rest
                else:
                    over = _listen(key.fd, found.output[key.data])
                    found.truncated |= key.data not in spared and len(found.output[key.data]) > most
                if over:
                    selector.unregister(key.fileobj)
                    if key.data == "stdin":
                        process.stdin.close()
            if found.truncated:
                break
        _end(process, found, seconds)
        for name, pipe in spared.items():
            _listen(pipe.fileno(), found.output[name])
    for name in ("stdout", "stderr"):
        del found.output[name][most:]
    return found


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, and what it has begun there.

    Bubblewrap's first child is bound to its parent's end only when all is set up, and would go on alone.
    """
    if process.returncode is None:  # not waited for, so the number is still its own
        os.killpg(process.pid, signal.SIGKILL)


def _feed(pipe: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(pipe, rest[:_CHUNK]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:  # it reads no more
        return rest[:0]


def _listen(pipe: int, text: bytearray) -> bool:
    """Take what is there; whether nothing can follow."""
    try:
        chunk = os.read(pipe, _CHUNK)
    except BlockingIOError:
        return False
    text += chunk
    return not chunk


def _end(process: subprocess.Popen[bytes], found: Watched, seconds: float) -> None:
    """Wait for the end, or bring it about."""
    if not (found.timed_out or found.truncated):
        try:
            found.exit_code = process.wait(found.left(seconds))
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            found.timed_out = True
    end_all(process)
    process.wait()
    found.seconds = time.monotonic() - found._started
