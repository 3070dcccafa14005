"""One call of a reward function, here or in a process of its own, and what went wrong in it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_rlhf.rewards.conventions import Call, EndsTheRun, Judged, WrongAnswer

# A launcher's variables would make a function that uses torch.distributed join the trainers, and a GPU be taken.
_NOT_FOR_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD")
_NOR_WHAT_BEGINS_WITH = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")
_MOST_OUTPUT = 10_000  # characters that one call may print
_WANTS_MESSAGES = "string indices must be integers"
_OURS = (__name__, "lightning_rlhf.rewards.conventions")
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.25  # between two looks at what a worker has started
EXITED = (
    97  # of a worker whose function ended it with exit code 0, which the pool would wait for until its time is over
)
_calls: dict[str, Call] = {}


class WorkerTraceback(Exception):
    """The traceback of what a function raised in another process."""


@dataclass
class Failure:
    """A call that gave no reward.

    Args:
        told: what happened, to follow the function's name.
        error: that it raised, if it is at hand.
        trace: the traceback as text, from another process.
        late: whether it took too long.
        ends: whether the run ends, whatever the policy for errors.
        place: of the completion in the rollout that it is about, where a call judged several.
    """

    told: str
    error: BaseException | None = None
    trace: str = ""
    late: bool = False
    ends: bool = False
    place: int | None = None

    @property
    def cause(self) -> BaseException | None:
        """What a sentence about it is raised from."""
        return self.error or (WorkerTraceback(f"\n{self.trace}") if self.trace else None)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What a function raised."""
        if isinstance(error, WrongAnswer):
            return cls(str(error), place=error.place)
        while error.__traceback__ and error.__traceback__.tb_frame.f_globals.get("__name__") in _OURS:
            if error.__traceback__.tb_next is None:
                break
            error.__traceback__ = error.__traceback__.tb_next  # its author knows his own lines
        told = f"raised {type(error).__name__}: {error}"
        if isinstance(error, TypeError) and _WANTS_MESSAGES in str(error) and _reads_a_message(error):
            told += "; it seems to take chat messages: give it messages: true"
        elif "main thread" in str(error):
            told += "; it wants a thread of its own: give it a timeout_s, and it works in processes"
        return cls(told, error, ends=isinstance(error, EndsTheRun))


def _reads_a_message(error: BaseException) -> bool:
    """Return whether the line that raised an error indexes with a key of chat messages, ``content`` or ``role``."""
    line = traceback.extract_tb(error.__traceback__)[-1:]
    return any(re.search(r"""\[\s*["'](content|role)["']\s*\]""", frame.line or "") for frame in line)


def attempt(call: Call, offered: Mapping[str, Any], places: Sequence[int]) -> Judged | Failure:
    """What a function says of some completions, whatever it does.

    Args:
        call: of the function.
        offered: lists with one entry for each completion.
        places: of the completions in the rollout.
    """
    try:
        return call.now(offered, places)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the policy of the reward decides, for classes of its author's own too
        return Failure.of(error)


async def attempt_later(call: Call, offered: Mapping[str, Any], places: Sequence[int]) -> Judged | Failure:
    """As :func:`attempt`, of an ``async`` function; other errors than these are those of its task."""
    try:
        return await call.later(offered, places)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop of all
        return Failure.of(error)


def prepare(references: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Make a new process ready, so that imports do not count as time of the first completion.

    Args:
        references: of functions, with the arguments of each.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends what never returns to Python too
    _report_exits()
    if sys.platform == "linux":
        _guard(os.getpid(), os.getppid())
    for name in list(os.environ):
        if name in _NOT_FOR_WORKERS or name.startswith(_NOR_WHAT_BEGINS_WITH):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout, sys.stderr = BoundedOutput(sys.stdout), BoundedOutput(sys.stderr)
    for function, arguments in references:
        with contextlib.suppress(ValueError):  # is said again by the first call
            _call(function, arguments)


def _report_exits() -> None:
    """Give this process a code of its own where a function ends it with 0: a pool takes 0 for the end of its work."""
    worker, leave = os.getpid(), os._exit

    def leave_with_a_code(status: int) -> None:
        leave(status or EXITED if os.getpid() == worker else status)

    os._exit = leave_with_a_code  # type: ignore[assignment]


def _guard(worker: int, trainer: int) -> None:
    """Start a process that, when this one or the trainer ends, ends whatever this one has started.

    Processes in sessions of their own are found too: this one adopts those whose parent has ended, so that all stay
    below it in the tree of processes, where the guard notes them.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork():
        return
    ends = [os.pidfd_open(worker), os.pidfd_open(trainer)]
    os.closerange(0, min(ends))  # or the others would not see that this worker's ends of their pipes are closed
    os.closerange(max(ends) + 1, os.sysconf("SC_OPEN_MAX"))
    started: dict[int, int] = {}  # descriptor of each process below the worker
    while not select.select(ends, [], [], _LOOK_SECONDS)[0]:
        _note(worker, started)
    trainer_ended = bool(select.select([ends[1]], [], [], 0)[0])
    _note(worker, started)
    for process in list(started):
        _note(process, started)
    for descriptor in started.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    if trainer_ended:
        _remove_semaphores()
    os.killpg(worker, signal.SIGKILL)  # this process too


def _note(root: int, started: dict[int, int]) -> None:
    """Open a descriptor of every process below one, and close those of processes that have ended.

    Args:
        root: process number.
        started: descriptors by process number; changed in place.
    """
    for process, descriptor in list(started.items()):
        if select.select([descriptor], [], [], 0)[0]:
            os.close(started.pop(process))
    below = [root]
    while below:
        for children in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for process in map(int, children.read_text().split()):
                    if process != os.getpid():
                        below.append(process)
                        if process not in started:
                            started[process] = os.pidfd_open(process)


def _remove_semaphores() -> None:
    """Remove the names of the semaphores that this process shares with a trainer that was killed.

    multiprocessing's resource tracker does it where it outlives the trainer; killed with a whole process group it does
    not.
    """
    mapped = Path("/proc/self/maps").read_text()
    for name in set(re.findall(r"/dev/shm/(sem\.mp-\w+)$", mapped, re.MULTILINE)):
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def work(
    function: Callable[..., Any] | str, arguments: Mapping[str, Any], offered: Mapping[str, Any], places: Sequence[int]
) -> Judged | Failure:
    """One call in this process; nothing but plain data goes back.

    Args:
        function: by reference, or as it was sent.
        arguments: of each call, or of the class.
        offered: lists with one entry for each completion.
        places: of the completions in the rollout.
    """
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, BoundedOutput)
        stream.left = _MOST_OUTPUT
    found = attempt(_call(function, arguments), offered, places)
    if isinstance(found, Failure) and found.error is not None:
        return Failure(found.told, trace="".join(traceback.format_exception(found.error)), ends=found.ends)
    return found


def _call(function: Callable[..., Any] | str, arguments: Mapping[str, Any]) -> Call:
    if not isinstance(function, str):
        return Call.of(function, arguments)
    key = f"{function} {arguments!r}"
    if key not in _calls:
        _calls[key] = Call.of(function, arguments)
    return _calls[key]


class BoundedOutput(io.TextIOBase):
    """Passes on what is written until there is too much of it.

    Args:
        stream: that it goes to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.left = stream, _MOST_OUTPUT

    def write(self, text: str) -> int:
        """Write what there is room for."""
        if self.left > 0:
            self._stream.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self._stream.write("\n[a reward function printed too much; the rest of this call is left out]\n")
        return len(text)

    def flush(self) -> None:
        """Pass it on now."""
        self._stream.flush()

    def fileno(self) -> int:
        """Of the stream itself."""
        return self._stream.fileno()
