"""The trainer's side of the engine process: commands, results, and the detection of its death."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.processes.child import Child, bytes_too_long, describe_exit, inherited_environment
from lightning_rlhf.processes.waiting import results_logged

log = logging.getLogger(__name__)
T = TypeVar("T")

_SEED_VARIABLE = "PL_GLOBAL_SEED"  # of the trainer, which would reseed the child
_CLOSE_SECONDS = 10
_GROUP_SECONDS = 1  # time for the worker's children to clean up before they are killed
_POLL_SECONDS = 0.5  # between looks at a worker that sends nothing
_WINDOW_SECONDS = 3600.0  # in which restarts are counted
_PROGRESS = re.compile(r"\bINFO \d\d-\d\d ")  # a line of vLLM's log that tells no cause
# vLLM ends at its start if free memory is less than its fraction, or grows while it measures its own.
_CHANGED_MEMORY = re.compile(r"Error in memory profiling|Free memory on device .* on startup")
_MEMORY_SECONDS = 5.0  # for a process that ends to release its memory
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: (No module named '[\w.]+')")


@dataclass
class Restarts:
    """Restarts of an engine process that has died, hangs, or sends messages that are not valid.

    Args:
        state: function that returns the commands after which a new process has the weights and images of the old one;
            None while weights are being written. An :class:`EngineDied` that it raises ends the restarts.
        check: validation of a completion and its request, which raises an error for one that no engine sends.
        most: largest number of restarts within an hour; 0 for none.
        silent_seconds: longest time without a message of a process that has something to do; None: no limit. A process
            that starts again may need three times the seconds of the first start in addition.
    """

    state: Callable[[], list[dict[str, Any]] | None]
    check: Callable[[dict[str, Any], dict[str, Any]], object]
    most: int = 3
    silent_seconds: float | None = 900.0
    _times: deque[float] = field(default_factory=deque)

    @property
    def recent(self) -> int:
        """Number of restarts within the last hour."""
        while self._times and time.monotonic() - self._times[0] > _WINDOW_SECONDS:
            self._times.popleft()
        return len(self._times)

    def count(self) -> None:
        """Count a restart."""
        self._times.append(time.monotonic())


class EngineProcess:
    """A child process that runs a worker module; if it ends, all pending futures raise :class:`EngineDied`.

    With restarts, a new process takes its place first: it gets the weights of the last push, and all commands and
    requests without a reply again, in their order. A process that has never been ready is started again once, and only
    if it died because other processes have released or not yet released memory of its GPU.

    The process has its own directory for temporary files, beside its log with the suffix ``.tmp``, which is removed
    when it is closed. A killed run leaves it, and the next process with the same log removes it.

    A thread reads the worker's messages from a socket pair, which is closed when the worker ends for any reason.
    Another thread writes to it, because a worker that starts or computes does not read.

    Args:
        module: module to run, for example ``lightning_rlhf.rollout.vllm.worker``.
        arguments: content of the first message.
        environment: environment variables to add to the inherited ones.
        log_file: file for the child's output, which that of restarted children follows.
        restarts: restarts of the process; None for none.
    """

    def __init__(
        self,
        module: str,
        arguments: dict[str, Any],
        environment: dict[str, str],
        log_file: Path,
        restarts: Restarts | None = None,
    ) -> None:
        self._log = log_file
        self._temporary = log_file.absolute().with_suffix(".tmp")
        self._module = module
        self._arguments = arguments
        self._environment = environment
        self._restarts = restarts
        self.restarted = 0  # number of restarts
        self._closing = False
        self._lock = threading.RLock()  # of the connection and the order of pending messages
        self._ids = itertools.count()
        self._pending: dict[str, tuple[Future[dict[str, Any]], dict[str, Any]]] = {}  # with their commands or requests
        self._death: EngineDied | None = None
        self._restored: Future[None] = Future()  # done when the present process has the state of the one before
        self._restored.set_result(None)
        self._state_replies = 0  # that are missing until then
        self._is_starting, self._began = True, 0.0  # of the present process
        self._start_seconds = 0.0  # of the first process
        self.ready: Future[dict[str, Any]] = Future()
        self._start()
        self._reader = threading.Thread(target=self._read, name="engine messages", daemon=True)
        self._reader.start()

    def _start(self, messages: Iterable[dict[str, Any]] = ()) -> None:
        """Start a child, and send it its arguments and further messages."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = Child(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                inherited_environment([_SEED_VARIABLE]) | self._environment | _temporary_files(self._temporary),
                log=self._log,
                append=self.restarted > 0,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._writer = DaemonThreads(1, "messages to the engine")
        self._is_starting, self._began = True, time.monotonic()
        for message in ({"kind": "start", "arguments": self._arguments}, *messages):
            self._send(message)

    def command(self, kind: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a command; return the future of its reply."""
        with self._lock:
            identity = str(next(self._ids))
            message = {"kind": kind, "id": identity, **fields}
            future = self._new_future(identity, message)
            self._send(message)
        return future

    def change_state(self, change: Callable[[], None]) -> None:
        """Call a function that changes what :attr:`Restarts.state` returns, when each restarted process has read that.

        Args:
            change: function; no process is started again while it runs.

        Raises:
            EngineDied: the engine has ended.
        """
        while True:
            with self._lock:
                if self._death is not None:
                    raise self._death
                restored = self._restored
                if restored.done():
                    return change()
            self.results([restored], "the engine to load its weights again")

    def generate(self, requests: list[dict[str, Any]]) -> list[Future[dict[str, Any]]]:
        """Queue requests; return the futures of the completions."""
        with self._lock:
            for request in requests:
                request["id"] = str(next(self._ids))
            futures = [self._new_future(request["id"], {"kind": "add", "requests": [request]}) for request in requests]
            self._send({"kind": "add", "requests": requests})
        return futures

    def results(self, futures: Sequence[Future[T]], description: str) -> list[T]:
        """Wait for all futures without a time limit; log a line every minute.

        Args:
            futures: futures from :attr:`ready`, :meth:`command` or :meth:`generate`, or derived from them.
            description: description of the futures for the log, after "Waiting for".

        Returns:
            The results, in the order of the futures.

        Raises:
            EngineDied: the engine has ended.
            RuntimeError: the worker reported an error.
        """
        return results_logged(futures, description, f"; the engine's log is {self._log}")

    def close(self) -> None:
        """End the worker, and kill it if it is still starting or does not end in time."""
        self._closing = True
        with self._lock:
            if self.ready.done():
                self._send({"kind": "close"})
            else:
                self.process.kill_group()
        self.process.end(_CLOSE_SECONDS, _GROUP_SECONDS)
        self._reader.join(_CLOSE_SECONDS)  # before closing: a new file could reuse the descriptor it reads from
        self._close_connection()
        _remove(self._temporary)

    def _close_connection(self) -> None:
        """Close the connection to a worker that has ended."""
        wait([self._writer.submit(lambda: None)], _CLOSE_SECONDS)  # until all messages are written
        self._writer.close()
        self._connection.close()

    def _new_future(self, identity: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """Return the future of a command or request; called with the lock, so that none is added after the death."""
        if self._death is not None:
            raise self._death
        future: Future[dict[str, Any]] = Future()
        self._pending[identity] = future, message
        return future

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            # A broken pipe means that the worker has ended; the reading thread detects that and fails all futures.
            self._writer.submit(self._connection.send_bytes, json.dumps(message).encode())

    def _read(self) -> None:
        death: EngineDied | None = None
        try:
            while True:
                reason = self._receive()
                death = self._describe(reason)
                self.process.end(_CLOSE_SECONDS, _GROUP_SECONDS)
                if not self._start_again(death):
                    break
        finally:
            self._fail_all(death or self._describe(None))
            self.process.end(_CLOSE_SECONDS, _GROUP_SECONDS)

    def _receive(self) -> str | None:
        """Handle the messages of the worker until it ends; return the reason, if it is known."""
        reason, silent = None, 0.0
        limit = None if self._restarts is None else self._restarts.silent_seconds
        try:
            while True:
                if limit is not None and not self._connection.poll(_POLL_SECONDS):
                    has_work = self._pending or not self._restored.done()
                    silent = silent + _POLL_SECONDS if has_work else 0.0
                    longest = limit + 3 * self._start_seconds * self._is_starting
                    if silent >= longest and self.ready.done():
                        allowed = "silent_seconds and three first starts" if self._is_starting else "silent_seconds"
                        reason = f"it did nothing for {round(longest, 1):g} s ({allowed})"
                        self.process.kill_group()
                    continue
                silent = 0.0
                message = json.loads(self._connection.recv_bytes())
                reason = self._handle(message) or reason
        except (EOFError, OSError):
            return reason
        except (ValueError, TypeError, KeyError, RunError) as error:
            self.process.kill_group()
            return f"it sent an invalid message ({type(error).__name__}: {error})"

    def _handle(self, message: dict[str, Any]) -> str | None:
        """Handle one message; return the reason of the worker's end if it has one."""
        kind = message["kind"]
        if kind == "ready":
            self._is_starting = False
            if not self.ready.done():
                self._start_seconds = time.monotonic() - self._began
                self.ready.set_result(message)
        elif kind == "fatal":
            return str(message["message"])
        elif kind == "alive":
            return None
        elif message["id"] is None:  # reply to a command of a restart
            if kind == "error":
                raise RunError(message["message"])
            self._state_replies -= 1
            if not self._state_replies:
                self._restored.set_result(None)
        elif message["id"] in self._pending:
            future, sent = self._pending[message["id"]]
            if kind == "finished" and self._restarts is not None:
                self._restarts.check(message, sent["requests"][0])
            del self._pending[message["id"]]
            if kind == "error":
                future.set_exception(RunError(message["message"]))
            else:
                future.set_result(message)
        return None

    def _start_again(self, death: EngineDied) -> bool:
        """Start a new worker in place of one that has died; return whether that is possible."""
        restarts = self._restarts
        if restarts is None or self._closing:
            return False
        if not self.ready.done():
            if self.restarted or not _CHANGED_MEMORY.search(self._log_text()):
                return False
            time.sleep(_MEMORY_SECONDS)
        if restarts.recent >= restarts.most:
            if restarts.most:
                log.warning("The engine was started again %d times in an hour, and is not again.", restarts.most)
            return False
        restarts.count()
        log.warning(
            "%s\nIt is started again, with the same weights and requests: %d of at most %d times in an hour.",
            death, restarts.recent, restarts.most,
        )  # fmt: skip
        try:
            while True:
                with self._lock:
                    if self._closing:
                        return False
                    state = restarts.state()
                    if state is not None:
                        self.restarted += 1
                        self._close_connection()
                        if self._restored.done():  # else others wait for it
                            self._restored = Future()
                        self._state_replies = len(state)
                        if not state:
                            self._restored.set_result(None)
                        pending = [message for _, message in self._pending.values()]
                        self._start([*({**message, "id": None} for message in state), *pending])
                        return True
                time.sleep(_POLL_SECONDS)
        except (EngineDied, OSError) as error:
            log.warning("The engine cannot be started again: %s", error)
            return False

    def _describe(self, reason: str | None) -> EngineDied:
        """Return the error of a worker that has ended, after its end."""
        try:
            cause = describe_exit(self.process.wait(_CLOSE_SECONDS))
        except subprocess.TimeoutExpired:
            self.process.kill_group()
            cause = "it still ran after the end of the connection, and was killed by the trainer (SIGKILL)"
        cause = reason or cause
        # vLLM reports only that it could not inspect the architecture.
        missing = _MISSING_MODULE.search(self._log_text())
        if missing and missing[1] not in cause:
            cause = f"{missing[1]} (the first missing module in its log), then {cause}"
        lines = [] if reason else self.process.log_tail().splitlines()
        tail = "\n".join(line for line in lines if not _PROGRESS.search(line))
        shown = f", and ends:\n{tail}" if tail else ""
        return EngineDied(f"the engine process {self.process.pid} died: {cause}; its log is {self._log}{shown}")

    def _log_text(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")
        return ""

    def _fail_all(self, death: EngineDied) -> None:
        """Set :class:`EngineDied` on all futures."""
        with self._lock:
            self._death = death
            futures: list[Future[Any]] = [self.ready, self._restored, *(future for future, _ in self._pending.values())]
            self._pending.clear()
        for future in futures:
            if not future.done():
                future.set_exception(death)


def _temporary_files(directory: Path) -> dict[str, str]:
    """Create a directory for temporary files; return the environment variables that set it.

    If a socket in it would have too long a path, there are no variables, and the directory of the system is used.
    """
    _remove(directory)
    if (excess := bytes_too_long(directory)) > 0:
        log.info(
            "Temporary files of the engine are in %s: paths of sockets in %s would be %d bytes too long.",
            tempfile.gettempdir(), directory, excess,
        )  # fmt: skip
        return {}
    directory.mkdir(parents=True, exist_ok=True)  # it is there where it could not be removed
    # Compiled code stays where later runs find it.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    return {"TMPDIR": str(directory), "TORCHINDUCTOR_CACHE_DIR": cache}


def _remove(directory: Path) -> None:
    """Remove a directory, if it exists; log what cannot be removed."""
    try:
        if directory.is_dir():
            shutil.rmtree(directory)
    except OSError as error:  # not fatal: a child of a killed engine may still write to it
        log.warning("Temporary files of the engine in %s could not be removed: %s", directory, error)


def remove_temporary_files(logs: Path, ranks: int) -> None:
    """Remove the temporary files that engines of a killed run with more ranks have left.

    Args:
        logs: directory of the engines' logs, ``rank<number>.log``; it may be missing.
        ranks: number of ranks of this run, whose engines remove their own files.
    """
    for directory in logs.glob("rank*.tmp"):
        number = directory.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= ranks:
            _remove(directory)
