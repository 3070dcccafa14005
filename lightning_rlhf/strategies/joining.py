"""Start of a distributed run: validate the launch, and log when processes are late to join."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch.distributed.constants import default_pg_timeout

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.launch_environment import Machine
from lightning_rlhf.processes.signals import ending_at

log = logging.getLogger(__name__)
_NODES_SECONDS = 8.0  # nodes of one job start within seconds of each other
_PROCESSES_SECONDS = 60.0  # processes of one machine import torch first: up to 30 s on a busy machine
_MOST_PER_CORE = 4  # processes on a CPU; more are probably a mistake
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def check_launch(environment: ClusterEnvironment, nodes: int, processes: int = 1) -> None:
    """Validate that the processes of several nodes can find each other; log if a machine has few cores for its own.

    Args:
        environment: Lightning's cluster environment of this process.
        nodes: number of nodes of the run.
        processes: number of processes that this one is about to start on a CPU, itself included.

    Raises:
        ValueError: this process was started without a launcher, and the address of the first node is not set.
    """
    missing = [name for name in _ADDRESS if name not in os.environ]
    if nodes > 1 and isinstance(environment, LightningEnvironment) and missing:
        raise UsageError(
            f"trainer.num_nodes is {nodes}, but {' and '.join(missing)} {'are' if missing[1:] else 'is'} not set, and "
            f"neither torchrun nor SLURM started this process, so the nodes cannot find each other: use one of the "
            f"launchers in examples/cluster, or start the same command on every node with MASTER_ADDR and MASTER_PORT "
            f"of the first node and NODE_RANK from 0 to {nodes - 1}"
        )
    cores = Machine.here(os.environ).cores
    if processes > _MOST_PER_CORE * cores:
        log.warning(
            "trainer.devices starts %d processes on a machine with %d cores: each loads the libraries and its part of "
            "the models, which takes long and needs much memory",
            *(processes, cores),
        )


@contextmanager
def joining(environment: ClusterEnvironment, nodes: int, processes: int, timeout: timedelta | None) -> Iterator[None]:
    """Log one line if the processes of a run are slow to join; raise a one-line error at the timeout.

    Args:
        environment: Lightning's cluster environment of this process.
        nodes: number of nodes of the run.
        processes: number of processes per node.
        timeout: longest wait; None is torch's default.

    Raises:
        RuntimeError: not all processes joined within the timeout.
    """
    seconds = (timeout or default_pg_timeout).total_seconds()
    line = _waiting_line(environment, nodes, processes)
    after = _NODES_SECONDS if nodes > 1 else _PROCESSES_SECONDS
    ending = f"the run ends if they do not join within {seconds:.0f} s (timeout of the strategy)"
    timer = threading.Timer(after, lambda: log.warning("%s; %s", line, ending))
    timer.daemon = True
    if environment.local_rank() == 0:
        timer.start()
    try:
        with ending_at(signal.SIGINT):  # torch would wait on
            yield
    except dist.DistError as error:
        raise RunError(f"{line}; not all joined within {seconds:.0f} s: {' '.join(str(error).split())}") from None
    finally:
        timer.cancel()


def _waiting_line(environment: ClusterEnvironment, nodes: int, processes: int) -> str:
    """Return a message with the address, the number of expected processes, and how to start them."""
    all_of = f"all {nodes * processes} processes of this run ({nodes} nodes with {processes} each)"
    where = f"waiting at {environment.main_address}, port {environment.main_port}, for {all_of}"
    if nodes == 1:
        return where
    if isinstance(environment, LightningEnvironment):
        return (
            f"{where}: neither torchrun nor SLURM started this process, so start the same command on every node with "
            f"the same MASTER_ADDR and MASTER_PORT and with NODE_RANK from 0 to {nodes - 1} (here "
            f"{environment.node_rank()}), or use a launcher (examples/cluster)"
        )
    return (
        f"{where}: {type(environment).__name__} set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; start the launcher "
        f"on every node with the same address, which every node must be able to reach"
    )
