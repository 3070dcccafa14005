"""Runs a function in several processes under gloo, as torchrun would, and returns their results."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import tempfile
import time
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process of a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_ranks(
    function: str, ranks: int, *arguments: Any, seconds: float = 280, environment: dict[str, str] | None = None
) -> list[Any]:
    """Call ``module:function`` with the arguments on every rank.

    Args:
        function: dotted module and name, importable from the project's root.
        ranks: number of processes, at least 1.
        arguments: JSON values.
        seconds: time limit, after which all processes are killed.
        environment: additional variables of the processes.

    Returns:
        The result of each rank; must be JSON values.

    Raises:
        RuntimeError: a rank failed or took too long; the message has the output of the first failed rank.
    """
    port = free_port()
    fork = _fork_server()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            variables = {**os.environ, **rank_environment(rank, ranks, port), **(environment or {})}
            process = fork.Process(target=_rank, args=(folder, function, json.dumps(arguments), variables, seconds))
            process.start()
            processes.append(process)
        try:
            failed = _first_failure(processes, time.monotonic() + seconds)
            late = failed is not None and processes[failed].exitcode is None
        finally:
            for process in processes:
                if process.exitcode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
        if failed is not None:
            log = Path(folder, f"{failed}.log").read_text(errors="replace")
            end = f"was killed after {seconds:.0f} s" if late else f"ended with {processes[failed].exitcode}"
            raise RuntimeError(f"rank {failed} of {ranks} {end} in {function}:\n{log[-6000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def python_path() -> str:
    """Return PYTHONPATH for a child: the repository, followed by the entries of this process."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Start a process that has imported the library; ranks are forked from it to save import time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }  # so many processes on so few cores: one thread each
    with unittest.mock.patch.dict(os.environ, variables):
        multiprocessing.forkserver.ensure_running()
    return context


def _rank(folder: str, function: str, arguments: str, variables: dict[str, str], seconds: float) -> None:
    """Run one rank in a separate session with its output and environment; write the result to a file.

    Five seconds before the rank is killed, the stack of each of its threads is written to its output.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    output = os.open(f"{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(max(1, seconds - 5), file=2)
    warnings.simplefilter("default")
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    Path(folder, f"{variables['RANK']}.json").write_text(json.dumps(result))


def _first_failure(processes: list[multiprocessing.context.ForkServerProcess], deadline: float) -> int | None:
    while True:
        codes = [process.exitcode for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)
