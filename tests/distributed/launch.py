"""Runs a function in several processes under gloo, as torchrun would, and brings their answers back."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Variables that torchrun gives a process of a single node."""
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
        arguments: what JSON can hold.
        seconds: after which all are killed.
        environment: further variables of the processes.

    Returns:
        What each rank returned, by rank; must be what JSON can hold.

    Raises:
        RuntimeError: a rank failed or took too long; the message holds the output of the first that failed.
    """
    port, environment = free_port(), environment or {}
    # So many processes on so few cores: one thread each.
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", **environment}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.distributed.launch", folder, function, json.dumps(arguments)]
        processes = []
        for rank in range(ranks):
            with Path(folder, f"{rank}.log").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**base, **rank_environment(rank, ranks, port)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            failed = _first_failure(processes, time.monotonic() + seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if failed is not None:
            log = Path(folder, f"{failed}.log").read_text(errors="replace")
            code = processes[failed].returncode
            raise RuntimeError(f"rank {failed} of {ranks} ended with {code} in {function}:\n{log[-6000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _first_failure(processes: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)


def _main(folder: str, function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
