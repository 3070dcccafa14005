"""A child process that generates, and everything that can happen to it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_rlhf.launch_environment import LAUNCHER_PREFIXES
from lightning_rlhf.rollout.arrivals import as_they_come
from lightning_rlhf.rollout.engine import EngineDied

log = logging.getLogger(__name__)

# A launcher's variables would make the child join the trainer's process group; the seed would reseed it.
_NOT_FOR_THE_CHILD = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "LD_PRELOAD",
)  # fmt: skip
_CLOSE_SECONDS = 10
_GROUP_SECONDS = 1  # what the worker started may end by itself, and clean up, for this long
_SAY_SECONDS = 60
_LOG_TAIL = 2000


class EngineProcess:
    """Starts a worker module, sends it commands, and turns its death into :class:`EngineDied` at once.

    A thread reads the worker's answers. The socket pair reaches its end the moment the worker is gone, however it
    ended, so no pending future outlives it.

    Args:
        module: to run, for example ``lightning_rlhf.rollout.vllm_worker``.
        arguments: sent first.
        environment: variables set for the child, beside those it inherits.
        log: file for the child's output.
    """

    def __init__(self, module: str, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        ours, theirs = socket.socketpair()
        inherited = {
            k: v for k, v in os.environ.items() if k not in _NOT_FOR_THE_CHILD and not k.startswith(LAUNCHER_PREFIXES)
        }
        with log.open("wb") as output, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env={**inherited, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._sending, self._expecting = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[str, Future[dict[str, Any]]] = {}
        self._death: EngineDied | None = None
        self.ready: Future[dict[str, Any]] = Future()
        self._send({"kind": "start", "arguments": arguments})
        self._reader = threading.Thread(target=self._read, name="engine answers", daemon=True)
        self._reader.start()

    def command(self, kind: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a command; the future is its reply."""
        identity, future = self._expect()
        self._send({"kind": kind, "id": identity, **fields})
        return future

    def generate(self, requests: list[dict[str, Any]]) -> list[Future[dict[str, Any]]]:
        """Queue requests; each future is the finished completion."""
        futures = []
        for request in requests:
            request["id"], future = self._expect()
            futures.append(future)
        self._send({"kind": "add", "requests": requests})
        return futures

    def answers(
        self,
        futures: Sequence[Future[dict[str, Any]]],
        waited_for: str,
        told: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Wait for all futures without a limit, and say so every minute: a silent engine may work, or hang.

        Args:
            futures: of :attr:`ready`, :meth:`command` or :meth:`generate`.
            waited_for: what they are, in a few words.
            told: called with the number of a future and its answer as soon as that is there.

        Returns:
            Their answers, in order.

        Raises:
            EngineDied: the engine is gone.
            RuntimeError: the worker refused.
        """
        began, numbers = time.monotonic(), {future: number for number, future in enumerate(futures)}
        for future in as_they_come(numbers, _SAY_SECONDS):
            if future is not None:
                number = numbers.pop(future)
                if told is not None and future.exception() is None:
                    told(number, future.result())
                continue
            count = f"{len(numbers)} of {len(futures)} " if len(futures) > 1 else ""
            seconds = time.monotonic() - began
            log.info("Waiting for %s%s for %.0f s; the engine's log is %s.", count, waited_for, seconds, self._log)
        for future in futures:
            error = future.exception()
            if error is not None:
                raise error  # from here, so that it is reported as an error of this package
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ask the worker to end, then make it; one that is still starting would not hear the question."""
        if self.ready.done():
            self._send({"kind": "close"})
        else:
            self._kill()
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._reader.join(_CLOSE_SECONDS)  # or it would read from whatever gets the descriptor next
        self._connection.close()

    def _kill(self) -> int:
        """End the worker and whatever it started: it leads a session of its own."""
        self._signal_group(signal.SIGKILL)
        return self.process.wait()

    def _signal_group(self, number: int) -> bool:
        """Whether there was anyone to signal."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _end_group(self) -> None:
        """End what the worker left behind."""
        end = time.monotonic() + _GROUP_SECONDS
        while self._signal_group(0) and time.monotonic() < end:
            time.sleep(0.02)
        self._signal_group(signal.SIGKILL)

    def _expect(self) -> tuple[str, Future[dict[str, Any]]]:
        with self._expecting:  # or a future could be added behind the back of the thread that buries them all
            if self._death is not None:
                raise self._death
            identity = str(next(self._numbers))
            future: Future[dict[str, Any]] = Future()
            self._pending[identity] = future
            return identity, future

    def _send(self, message: dict[str, Any]) -> None:
        # A broken pipe means the worker is gone: the reading thread sees that too, and answers every future.
        with self._sending, contextlib.suppress(OSError):
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
                        future.set_exception(RuntimeError(message["message"]))
                    else:
                        future.set_result(message)
        except (EOFError, OSError):
            pass
        except (ValueError, TypeError, KeyError) as error:
            reason = f"it gave an answer that nobody understands ({type(error).__name__}: {error})"
            self._kill()
        finally:
            self._bury(reason)
            self._end_group()

    def _bury(self, reason: str | None) -> None:
        try:
            code = self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it stopped talking, but will not go
            code = self._kill()
        ended = reason or (f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}")
        tail = "" if reason or not self._log.exists() else self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        ends = f", and ends:\n{tail}" if tail else ""
        with self._expecting:
            self._death = EngineDied(
                f"the engine process {self.process.pid} died: {ended}; its log is {self._log}{ends}"
            )
        for future in [self.ready, *self._pending.values()]:
            if not future.done():
                future.set_exception(self._death)
        self._pending.clear()


def _signal_name(number: int) -> str:
    names = {member.value: member.name for member in signal.Signals}
    return f"signal {number} ({names.get(number, 'without a name')})"
