"""The trainer's side of the engine process: commands, results, and the detection of its death."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.launch_environment import LAUNCHER_PREFIXES
from lightning_rlhf.rollout.vllm.requests import as_completed_with_heartbeat

log = logging.getLogger(__name__)
T = TypeVar("T")

# A launcher's variables would make the child join the trainer's torch.distributed group, the seed would reseed it, and
# preloaded libraries, such as an allocator, are those that the trainer needs.
_NOT_INHERITED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "LD_PRELOAD",
)  # fmt: skip
_CLOSE_SECONDS = 10
_GROUP_SECONDS = 1  # time for the worker's children to clean up before they are killed
_HEARTBEAT_SECONDS = 60
_LOG_TAIL = 2000
_MAX_SOCKET_PATH = 107  # longest path of a unix socket in bytes
_SOCKET_NAME_BYTES = 37  # bytes of vLLM's names of sockets, a slash and a UUID
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: (No module named '[\w.]+')")


class EngineProcess:
    """A child process that runs a worker module; if it ends, all pending futures raise :class:`EngineDied`.

    The process has its own directory for temporary files, beside its log with the suffix ``.tmp``, which is removed
    when it is closed. A killed run leaves it, and the next process with the same log removes it.

    A thread reads the worker's messages from a socket pair, which is closed when the worker ends for any reason.

    Args:
        module: module to run, for example ``lightning_rlhf.rollout.vllm.worker``.
        arguments: content of the first message.
        environment: environment variables to add to the inherited ones.
        log_file: file for the child's output.
    """

    def __init__(self, module: str, arguments: dict[str, Any], environment: dict[str, str], log_file: Path) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_file
        self._temporary = log_file.absolute().with_suffix(".tmp")
        ours, theirs = socket.socketpair()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_INHERITED and not name.startswith(LAUNCHER_PREFIXES)
        }
        with log_file.open("wb") as output, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env={**inherited, **environment, **_temporary_files(self._temporary)},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._send_lock = threading.Lock()
        self._pending_lock = threading.Lock()
        self._ids = itertools.count()
        self._pending: dict[str, Future[dict[str, Any]]] = {}
        self._death: EngineDied | None = None
        self.ready: Future[dict[str, Any]] = Future()
        self._send({"kind": "start", "arguments": arguments})
        self._reader = threading.Thread(target=self._read, name="engine messages", daemon=True)
        self._reader.start()

    def command(self, kind: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a command; return the future of its reply."""
        identity, future = self._new_future()
        self._send({"kind": kind, "id": identity, **fields})
        return future

    def generate(self, requests: list[dict[str, Any]]) -> list[Future[dict[str, Any]]]:
        """Queue requests; return the futures of the completions."""
        futures = []
        for request in requests:
            request["id"], future = self._new_future()
            futures.append(future)
        self._send({"kind": "add", "requests": requests})
        return futures

    def results(
        self,
        futures: Sequence[Future[T]],
        description: str,
        on_result: Callable[[int, T], None] | None = None,
    ) -> list[T]:
        """Wait for all futures without a time limit; log a line every minute.

        Args:
            futures: futures from :attr:`ready`, :meth:`command` or :meth:`generate`, or derived from them.
            description: description of the futures for the log, after "Waiting for".
            on_result: callback with the index of a future and its result, called as soon as it is available.

        Returns:
            The results, in the order of the futures.

        Raises:
            EngineDied: the engine has ended.
            RuntimeError: the worker reported an error.
        """
        began = time.monotonic()
        indices = {future: index for index, future in enumerate(futures)}
        for future in as_completed_with_heartbeat(indices, _HEARTBEAT_SECONDS):
            if future is None:
                count = f"{len(indices)} of {len(futures)} " if len(futures) > 1 else ""
                seconds = time.monotonic() - began
                log.info("Waiting for %s%s for %.0f s; the engine's log is %s.", count, description, seconds, self._log)
            else:
                index = indices.pop(future)
                if on_result is not None and future.exception() is None:
                    on_result(index, future.result())
        for future in futures:
            error = future.exception()
            if error is not None:
                raise error  # not by future.result(): the traceback should end in this package
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the worker, and kill it if it is still starting or does not end in time."""
        if self.ready.done():
            self._send({"kind": "close"})
        else:
            self._kill()
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._reader.join(_CLOSE_SECONDS)  # before closing: a new file could reuse the descriptor it reads from
        self._connection.close()
        _remove(self._temporary)

    def _kill(self) -> int:
        """Kill the worker's process group and return the worker's exit code."""
        self._signal_group(signal.SIGKILL)
        return self.process.wait()

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the worker's process group; return whether the group exists."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _end_group(self) -> None:
        """End the worker's remaining children."""
        deadline = time.monotonic() + _GROUP_SECONDS
        while self._signal_group(0) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal_group(signal.SIGKILL)

    def _new_future(self) -> tuple[str, Future[dict[str, Any]]]:
        with self._pending_lock:  # otherwise a future could be added after _fail_all, and never finish
            if self._death is not None:
                raise self._death
            identity = str(next(self._ids))
            future: Future[dict[str, Any]] = Future()
            self._pending[identity] = future
            return identity, future

    def _send(self, message: dict[str, Any]) -> None:
        # A broken pipe means that the worker has ended; the reading thread detects that and fails all futures.
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def _read(self) -> None:
        reason = None
        try:
            while True:
                message = json.loads(self._connection.recv_bytes())
                if message["kind"] == "ready":
                    self.ready.set_result(message)
                elif message["kind"] == "fatal":
                    reason = message["message"]
                elif future := self._pending.pop(message["id"], None):
                    if message["kind"] == "error":
                        future.set_exception(RunError(message["message"]))
                    else:
                        future.set_result(message)
        except (EOFError, OSError):
            pass
        except (ValueError, TypeError, KeyError) as error:
            reason = f"it sent an invalid message ({type(error).__name__}: {error})"
            self._kill()
        finally:
            self._fail_all(reason)
            self._end_group()

    def _fail_all(self, reason: str | None) -> None:
        """Set :class:`EngineDied` on all futures."""
        try:
            code = self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # the worker closed the connection but still runs
            code = self._kill()
        cause = reason or (f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}")
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        missing = _MISSING_MODULE.search(text)  # vLLM reports only that it could not inspect the architecture
        if missing and missing[1] not in cause:
            cause = f"{missing[1]} (the first missing module in its log), then {cause}"
        tail = "" if reason else text[-_LOG_TAIL:].strip()
        shown = f", and ends:\n{tail}" if tail else ""
        with self._pending_lock:
            self._death = EngineDied(
                f"the engine process {self.process.pid} died: {cause}; its log is {self._log}{shown}"
            )
        for future in [self.ready, *self._pending.values()]:
            if not future.done():
                future.set_exception(self._death)
        self._pending.clear()


def _temporary_files(directory: Path) -> dict[str, str]:
    """Create a directory for temporary files; return the environment variables that set it.

    If a socket in it would have too long a path, there are no variables, and the directory of the system is used.
    """
    _remove(directory)
    longest = len(os.fsencode(directory)) + _SOCKET_NAME_BYTES
    if longest > _MAX_SOCKET_PATH:
        log.info(
            "Temporary files of the engine are in %s: paths of sockets in %s would have %d bytes (at most %d).",
            tempfile.gettempdir(), directory, longest, _MAX_SOCKET_PATH,
        )  # fmt: skip
        return {}
    directory.mkdir(exist_ok=True)  # where it could not be removed
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


def _signal_name(number: int) -> str:
    names = {member.value: member.name for member in signal.Signals}
    return f"signal {number} ({names.get(number, 'unnamed')})"
