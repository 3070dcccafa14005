"""Several engines on this machine for ``generate``, each in a process of its own, and what such a process does.

Run as a module it is one of these processes: it reads the prompts of the same command line, then receives lines with
the positions of prompts, and answers each with a line of rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.processes.child import Child, describe_exit, end_with_parent, inherited_environment

_CLOSE_SECONDS = 15.0


def engine_environments(engines: int, gpus_of_each: int) -> list[dict[str, str]]:
    """Return the variables that give each engine its GPUs or, on a machine without GPUs, its CPU threads.

    Args:
        engines: number of engines, at least 1.
        gpus_of_each: number of GPUs that share a model.

    Raises:
        UsageError: there are too few GPUs.
    """
    if not torch.cuda.is_available():
        return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // engines))}] * engines
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    gpus = named or [str(index) for index in range(torch.cuda.device_count())]
    if engines * gpus_of_each > len(gpus):
        raise UsageError(
            f"--engines {engines} with --tensor-parallel-size {gpus_of_each} need {engines * gpus_of_each} GPUs, this "
            f"machine has {len(gpus)}: set --engines {max(1, len(gpus) // gpus_of_each)}"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + gpus_of_each])}
        for first in range(0, engines * gpus_of_each, gpus_of_each)
    ]


class EnginePool:
    """Processes with an engine each, which generate the rows of the positions that they get.

    Args:
        arguments: command line of ``generate``.
        environments: further variables of each process, from :func:`engine_environments`.
        output: file of the command; the logs are beside it.
    """

    def __init__(self, arguments: Sequence[str], environments: Sequence[dict[str, str]], output: Path) -> None:
        self._processes = list[Child]()
        self._connections = list[socket.socket]()
        self._replies = list[IO[str]]()
        self.idle = set[int]()  # numbers of the engines that are ready for positions
        try:
            for number, environment in enumerate(environments):
                self._start(number, arguments, environment, output)
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, arguments: Sequence[str], environment: dict[str, str], output: Path) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        self._replies.append(ours.makefile("r", encoding="utf-8"))
        log = output.with_name(f"{output.name}.engine.{number}.log")
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(log.with_suffix(".vllm.log")), *arguments]
        with theirs:
            everything = {**inherited_environment(), **environment}
            self._processes.append(Child(command, everything, log, pass_fds=[theirs.fileno()]))

    def wait(self, prompts: str) -> str:
        """Wait until all engines have loaded the model, and return the description of one.

        Args:
            prompts: digest of the prompts that they must have read.

        Raises:
            RunError: an engine failed, or has read other prompts.
        """
        for number in range(len(self._processes)):
            reply = self._reply(number)
            if reply["prompts"] != prompts:
                raise RunError("an engine has read other prompts than this process: do not change the file meanwhile")
        self.idle = set(range(len(self._processes)))
        return f"{len(self._processes)} x {reply['description']}"

    def ask(self, number: int, positions: range) -> None:
        """Ask an idle engine for the rows of some prompts."""
        self.idle.remove(number)
        with contextlib.suppress(OSError):  # it has ended, which its missing reply shows
            self._connections[number].sendall(f"{json.dumps([positions.start, positions.stop])}\n".encode())

    def next_rows(self) -> tuple[int, list[dict[str, Any]], int]:
        """Wait for an engine that was asked, and return its number, its rows and their number of tokens.

        Raises:
            RunError: the engine failed.
        """
        busy = [connection for i, connection in enumerate(self._connections) if i not in self.idle]
        number = self._connections.index(select.select(busy, [], [])[0][0])
        reply = self._reply(number)
        self.idle.add(number)
        return number, reply["rows"], reply["tokens"]

    def _reply(self, number: int) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            if line := self._replies[number].readline():
                reply: dict[str, Any] = json.loads(line)
                if "error" in reply:
                    raise RunError(f"engine {number + 1} of {len(self._processes)}: {reply['error']}")
                return reply
        process = self._processes[number]
        ended = describe_exit(process.end(_CLOSE_SECONDS))
        raise RunError(
            f"engine {number + 1} of {len(self._processes)} ended: {ended}; the same command continues; {process.log} "
            f"ends with:\n{process.log_tail()}"
        )

    def close(self, remove_logs: bool = False) -> None:
        """End the processes; remove their logs after a success."""
        for reply, connection in zip(self._replies, self._connections, strict=True):
            reply.close()
            connection.close()  # asks it to end
        for process in self._processes:
            process.end(_CLOSE_SECONDS)
            if remove_logs and process.log is not None:
                process.log.unlink(missing_ok=True)
                process.log.with_suffix(".vllm.log").unlink(missing_ok=True)


def _work(connection: socket.socket, log: Path, arguments: list[str]) -> None:
    """Be one of the processes: load the model, then generate until the connection closes."""
    from lightning_rlhf.expected_errors import ExpectedError
    from lightning_rlhf.extras.commands import generate
    from lightning_rlhf.extras.commands.response_backends import prompts_digest

    with connection, connection.makefile("rw", encoding="utf-8") as lines:

        def reply(**values: Any) -> None:
            lines.write(json.dumps(values) + "\n")
            lines.flush()

        try:
            with generate.started(arguments, log) as (backend, prompts, options, description):
                reply(description=description, prompts=prompts_digest(prompts))
                while line := lines.readline():
                    rows, tokens = generate.generate_rows(backend, prompts, range(*json.loads(line)), options)
                    reply(rows=rows, tokens=tokens)
        except ExpectedError as error:
            reply(error=str(error))


if __name__ == "__main__":
    if sys.platform == "linux":
        end_with_parent()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the command has ended
        _work(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
