"""Fail fast: when a rank fails, all ranks exit. The failed rank prints its traceback, the others one line naming it.

Without this, the original traceback is hidden among long tracebacks of its peers ("Connection closed by peer"), hanging
ranks outlive the run, and NCCL waits until its timeout.

Every rank keeps a connection to a hub in rank 0's process. A rank that fails reports to the hub, which notifies
all. The kernel closes the connection of a killed process at once, and that of a lost machine within 30 seconds.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import typing_extensions
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from lightning_rlhf import launch_environment
from lightning_rlhf.compat import is_lightning_error
from lightning_rlhf.expected_errors import ExpectedError, Interrupted, RunError
from lightning_rlhf.processes.child import end_with_launcher
from lightning_rlhf.strategies.failure_hub import LOST_CONNECTION, Hub, Wire
from lightning_rlhf.strategies.joining import check_launch, joining

_ROOT_CAUSE_SECONDS = 5  # longest wait, after a lost connection, for the report of the rank that failed first
_EXIT_SECONDS = 20  # from a failure to a forced exit; engines close and loggers flush meanwhile
_CHILDREN_SECONDS = 3  # for a launcher's children to exit
_TORCHRUN_SECONDS = 2  # torchrun blames the first process that exits, so the failed rank must be that one
_UNDER_TORCHRUN = "TORCHELASTIC_ERROR_FILE" in os.environ
# Parts of the messages of gloo and NCCL about a lost peer; torch raises some of them as RuntimeError.
_LOST_PEER = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_LIBRARIES = tuple(f"{Path(str(library.__file__)).parent}/" for library in (torch, lightning))
_LIBRARIES += (typing_extensions.__file__, f"{Path(str(torch.__file__)).parent.parent}/deepspeed/")


class FailureWatch:
    """Monitor that ends this process when this or another rank fails.

    Args:
        world_size: number of ranks.
        node: index of this process's node.
        children: processes launched by this one, which are ended with it.
    """

    def __init__(self, rank: int, world_size: int, node: int, children: Sequence[subprocess.Popen[Any]] = ()) -> None:
        self._rank = rank
        self._world_size = world_size
        self._children = children
        self._name = f"rank {rank} (node {node}, host {socket.gethostname()}, process {os.getpid()})"
        self._node = node
        self._wire: Wire | None = None
        self._listener: threading.Thread | None = None
        self._other_failed = threading.Event()
        self._failed = self._reporting = self._closing = False
        self._hub_name = ""
        self._code = 1  # exit code after a failure

    def start(self, address: str, several_nodes: bool, broadcast: Callable[[Any], Any]) -> None:
        """Connect this rank to the hub. All ranks.

        Args:
            address: address of rank 0's machine.
            several_nodes: whether the run has several machines; otherwise the hub listens on localhost only.
            broadcast: function that returns rank 0's object on all ranks.

        Raises:
            RuntimeError: rank 0 cannot be reached.
        """
        if self._world_size == 1:
            return
        hub = None if self._rank else Hub(self._world_size, secrets.token_hex(16), several_nodes)
        port, token, self._hub_name = broadcast((hub.port, hub.token, self._name) if hub else None)
        host = address if several_nodes and self._rank else "127.0.0.1"
        try:
            self._wire = Wire(socket.create_connection((host, port), timeout=60))
        except OSError as error:
            raise RunError(
                f"{self._name} cannot reach rank 0 at {host}, port {port} ({error}): machines of one run must reach "
                f"each other on all ports, under the address in MASTER_ADDR"
            ) from error
        self._wire.send(kind="join", token=token, rank=self._rank, name=self._name, node=self._node)
        self._listener = threading.Thread(target=self._listen, name="failure watch", daemon=True)
        self._listener.start()
        end_with_launcher(launch_environment.is_first_process(), is_loading=False)

    def report(self, error: BaseException, code: int = 1) -> None:
        """Report to all ranks that this one failed. If another rank failed first, end this process instead.

        An invalid configuration usually raises on all ranks at once; then only rank 0 reports it.

        Args:
            error: the exception that ends this rank.
            code: exit code of every rank; 2 for an expected error before the first training step.
        """
        if self._wire is None or self._closing or self._failed:
            return
        self._reporting = True
        if _lost_a_peer(error) or (code == 2 and self._rank):
            self._other_failed.wait(_ROOT_CAUSE_SECONDS)
        if self._other_failed.is_set():
            self._exit_after_timeout()
            threading.Event().wait()  # block until the process exits
        self._failed = True
        self._code = code
        if code == 1 or self._rank:
            _write_line(f"{self._name} failed; ending all ranks.")
        _record_for_torchrun(error)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        self._wire.send(kind="failed", text=f"{self._name} failed: {message[:500]}", code=code)
        atexit.register(self._end_others)
        self._exit_after_timeout()

    def close(self) -> None:
        """Close the connection after a successful run; do nothing after a failure."""
        if self._wire is None or self._failed or self._listener is None:
            return
        self._closing = True
        self._wire.send(kind="done")
        if self._rank == 0:
            self._listener.join(_ROOT_CAUSE_SECONDS)  # keep the hub alive until it has answered all ranks

    def _listen(self) -> None:
        assert self._wire is not None
        while not self._wire.ended:
            for message in self._wire.receive():
                if message["kind"] == "done":  # the hub may close its connections from now on
                    self._closing = True
                    self._wire.connection.close()
                    return
                if message["kind"] == "failed":
                    self._handle_failure(message["text"], message.get("code", 1))
                if message["kind"] == "end" and not self._failed:
                    self._exit(_TORCHRUN_SECONDS if _UNDER_TORCHRUN else 0)
        if not self._closing and not self._failed:
            self._handle_failure(f"{self._hub_name} {LOST_CONNECTION}")
            self._exit(_TORCHRUN_SECONDS if _UNDER_TORCHRUN else 0)

    def _handle_failure(self, text: str, code: int = 1) -> None:
        """Print that another rank failed, and schedule the exit of this process."""
        if self._failed or self._other_failed.is_set():
            return
        self._code = code
        self._other_failed.set()
        if self._reporting and code == 2:  # rank 0 has reported the same error
            self._exit_after_timeout()
            return
        main = sys._current_frames()[threading.main_thread().ident or 0]
        location = "" if self._reporting else f" in {location_of(main)}"
        message = f"{self._name} ends{location}: {text}."
        _write_line(message)
        _record_for_torchrun(RuntimeError(message))
        self._exit_after_timeout()

    def _exit_after_timeout(self) -> None:
        """Schedule a forced exit, in case the regular shutdown hangs."""
        timer = threading.Timer(_EXIT_SECONDS, self._exit)
        timer.daemon = True
        timer.start()

    def _exit(self, delay: float = 0) -> None:
        time.sleep(delay)
        self._end_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._code)  # sys.exit would not end a main thread that waits in a collective

    def _end_others(self) -> None:
        """Close the connection so that the other ranks exit, and end the child processes."""
        assert self._wire is not None
        if self._children:  # otherwise the end of this process closes the connection
            self._wire.hang_up()
        deadline = time.monotonic() + _CHILDREN_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


class EndsTogether:
    """Mixin of strategies over several processes that ends all ranks when one fails."""

    _watch: FailureWatch | None = None

    def _configure_launcher(self) -> None:
        """Check the launch before Lightning starts the other processes of this machine."""
        strategy: Any = self
        end_with_launcher(launch_environment.is_first_process(), is_loading=True)
        starts = strategy.root_device.type == "cpu" and not strategy.cluster_environment.creates_processes_externally
        processes = strategy.num_processes if starts and launch_environment.is_first_process() else 1
        check_launch(strategy.cluster_environment, strategy.num_nodes, processes)
        super()._configure_launcher()  # type: ignore[misc]

    def setup_environment(self) -> None:
        """Initialize the process group, then start the failure watch."""
        strategy: Any = self
        launch_environment.apply(strategy.num_processes)  # for runs that the command line did not start
        with self.joining():
            super().setup_environment()  # type: ignore[misc]
        self.watch_ranks()

    def joining(self) -> AbstractContextManager[None]:
        """Return a context that logs when other processes are late; see :func:`joining.joining`."""
        strategy: Any = self
        timeout = getattr(strategy, "_timeout", None)
        return joining(strategy.cluster_environment, strategy.num_nodes, strategy.num_processes, timeout)

    def watch_ranks(self) -> None:
        """Start the failure watch. All ranks."""
        strategy: Any = self
        children = getattr(strategy.launcher, "procs", ())
        self._watch = FailureWatch(strategy.global_rank, strategy.world_size, strategy.node_rank, children)
        self._watch.start(strategy.cluster_environment.main_address, strategy.num_nodes > 1, strategy.broadcast)

    def on_exception(self, exception: BaseException) -> None:
        """Report an exception to the other ranks; not an interrupt during training, on which all ranks agree."""
        strategy: Any = self
        started = strategy.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
        agreed = isinstance(exception, Interrupted) and started
        if self._watch is not None and not agreed:
            self._watch.report(exception, _exit_code(exception, started))
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Stop the failure watch."""
        super().teardown()  # type: ignore[misc]
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _lost_a_peer(error: BaseException | None) -> bool:
    """Return whether the error, or one of its causes, reports a lost peer."""
    while error is not None:
        is_about_peer = isinstance(error, RuntimeError | OSError) and any(part in str(error) for part in _LOST_PEER)
        if is_about_peer or isinstance(error, torch.distributed.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def location_of(frame: FrameType) -> str:
    """Return a thread's innermost line outside of torch, Lightning and DeepSpeed, and the library function it runs."""
    stack = traceback.extract_stack(frame)
    line = next((line for line in reversed(stack) if not line.filename.startswith((*_LIBRARIES, "<"))), stack[-1])
    called = "" if line is stack[-1] else f", in {stack[-1].name}()"
    return f"{line.filename}:{line.lineno}, {line.name}(){called}"


def _record_for_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun prints in its summary."""
    if _UNDER_TORCHRUN:
        ErrorHandler().record_exception(error)


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _exit_code(error: BaseException, started: bool) -> int:
    """Return the exit code: an interrupt's own, 2 for an expected error before the first training step, else 1."""
    if isinstance(error, Interrupted):
        return error.exit_code
    if not started and (isinstance(error, ExpectedError) or is_lightning_error(error)):
        return 2
    return 1
