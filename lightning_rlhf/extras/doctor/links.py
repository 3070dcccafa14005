"""Checks of ``lightning-rlhf doctor`` for the links between the machines of a run, and to vLLM servers."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_rlhf.compat import set_group_timeout
from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers.client import RejectedKey, VLLMServer
from lightning_rlhf.extras.servers.servers import Addresses

Fact = tuple[str, str, str]  # name, value, and a fault or an empty string

_JOIN_SECONDS = 60
_MEASURE_SECONDS = 3600
_SERVER_SECONDS = 10.0
_ROUND_TRIPS = 20
_LARGEST_BYTES = 1 << 28
_MEASURED_SECONDS = 0.5  # messages grow until one takes this long
_SLOW_BYTES = 10**8  # per second: a tenth of what 10 Gbit/s Ethernet has
_SLOW_SECONDS = 0.01
_LOSS = 1e-3  # fraction of TCP segments that are sent again over a slow link
_LOSS_OF_FAST_LINKS = 1e-2  # bursts lose some where buffers are short, which costs no speed
_SNMP = Path("/proc/net/snmp")


def link_findings(environ: Mapping[str, str] = os.environ) -> list[Fact]:
    """Measure round trips and bandwidth between the first machine and each other one. All ranks.

    Args:
        environ: environment of this process, which torchrun or srun has started.
    """
    kinds: tuple[type[ClusterEnvironment], ...] = (TorchElasticEnvironment, SLURMEnvironment)
    launcher = next((kind() for kind in kinds if kind.detect()), None)
    if launcher is None or launcher.world_size() == 1:
        return [("links", "not measured: start doctor --links on all machines with torchrun or srun", "")]
    address, port = launcher.main_address, launcher.main_port
    rank, size = launcher.global_rank(), launcher.world_size()
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port), ("RANK", rank), ("WORLD_SIZE", size)):
        os.environ.setdefault(name, str(value))
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_JOIN_SECONDS))
        dist.barrier()
        group = dist.group.WORLD
        assert group is not None
        set_group_timeout(group, timedelta(seconds=_MEASURE_SECONDS))  # machines are measured in turn
    except (RuntimeError, OSError, ValueError) as error:
        fault = (
            f"rank {rank} of {size} on {socket.gethostname()} could not connect to the others through {address}:{port} "
            f"within {_JOIN_SECONDS} s: all ports between the machines must be open, and all must resolve that name "
            f"({str(error).splitlines()[0]})"
        )
        return [("links", "no connection", fault)]
    try:
        return _measured(rank, launcher.local_rank())
    except RuntimeError as error:
        fault = f"the connection of rank {rank} on {socket.gethostname()} broke while it was measured: {error}"
        return [("links", "broken connection", fault.splitlines()[0])]
    finally:
        dist.destroy_process_group()


def _measured(rank: int, local_rank: int) -> list[Fact]:
    """Measure the links of the first rank to the first rank of each other machine; return them on the first rank."""
    machines: list[tuple[str, bool]] = [("", False)] * dist.get_world_size()
    dist.all_gather_object(machines, (socket.gethostname(), local_rank == 0))
    before = _segments()
    links = {}
    for peer, (name, is_first) in enumerate(machines):
        if peer and is_first:
            if rank == 0:
                links[f"to rank {peer} on {name}"] = _ping(peer)
            elif rank == peer:
                _answer()
    after = _segments()
    losses = [0.0] * len(machines)
    sent, repeated = (after[i] - before[i] for i in range(2))
    dist.all_gather_object(losses, repeated / max(sent, 1))
    if rank:
        return []
    findings = [_link_finding(name, *measured) for name, measured in links.items()]
    if not links:
        return [("links", "all ranks are on this machine", "")]
    loss = max(losses)
    is_slow = any(rate < _SLOW_BYTES for _, rate in links.values())
    return [*findings, ("lost segments", f"{loss:.2%}", _loss_fault(loss, is_slow))]


def _loss_fault(loss: float, is_slow: bool) -> str:
    if loss <= (_LOSS if is_slow else _LOSS_OF_FAST_LINKS):
        return ""
    return f"{loss:.1%} of the TCP segments were lost and sent again: check cables, switches and the network's load"


def _link_finding(name: str, seconds: float, rate: float) -> Fact:
    faults = []
    if rate < _SLOW_BYTES:
        faults.append(f"transfers {rate / 1e6:.1f} MB/s, so that gradients and weights take long")
    if seconds > _SLOW_SECONDS:
        faults.append(f"has round trips of {1000 * seconds:.1f} ms")
    fault = f"the link {name} {' and '.join(faults)}: is it the right interface (GLOO_SOCKET_IFNAME)?" if faults else ""
    return f"link {name}", f"{1000 * seconds:.2f} ms, {rate / 1e6:.0f} MB/s", fault


def _ping(peer: int) -> tuple[float, float]:
    """Return the median seconds of a round trip to a rank, and the bytes per second of a large message."""
    word = torch.zeros(1)
    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        dist.send(word, peer)
        dist.recv(word, peer)
        times.append(time.perf_counter() - began)
    size = 1 << 18
    while True:
        dist.send(torch.tensor([float(size)]), peer)
        message = torch.zeros(size // 4)
        began = time.perf_counter()
        dist.send(message, peer)
        dist.recv(word, peer)
        seconds = time.perf_counter() - began
        if seconds > _MEASURED_SECONDS or size >= _LARGEST_BYTES:
            dist.send(torch.zeros(1), peer)
            return statistics.median(times), size / seconds
        size *= 4


def _answer() -> None:
    """Answer the messages of :func:`_ping`."""
    word = torch.zeros(1)
    for _ in range(_ROUND_TRIPS):
        dist.recv(word, 0)
        dist.send(word, 0)
    while True:
        dist.recv(word, 0)
        if not word.item():
            return
        dist.recv(torch.zeros(int(word.item()) // 4), 0)
        dist.send(word, 0)


def _segments() -> tuple[int, int]:
    """Return the numbers of TCP segments that this machine has sent, and sent again."""
    try:
        names, values = (line.split()[1:] for line in _SNMP.read_text().splitlines() if line.startswith("Tcp:"))
    except (OSError, ValueError):
        return 0, 0
    counts = dict(zip(names, map(int, values), strict=True))
    return counts["OutSegs"], counts["RetransSegs"]


def server_findings(urls: Sequence[str], key_variable: str = "VLLM_API_KEY") -> list[Fact]:
    """Check that vLLM servers respond, and require their key.

    Args:
        urls: addresses, or the path of one file ``*.txt`` with an address in each line.
        key_variable: environment variable with the servers' key.
    """
    addresses = Addresses(urls[0] if len(urls) == 1 else urls)
    known = addresses.read()
    if not known:
        return [("servers", "none", f"no address in {addresses.urls}: each server writes its address when it starts")]
    return [
        _server_finding(VLLMServer(url, os.environ.get(key_variable), _SERVER_SECONDS), key_variable) for url in known
    ]


def _server_finding(server: VLLMServer, key_variable: str) -> Fact:
    try:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            socket.create_connection((server.host, server.port), timeout=_SERVER_SECONDS).close()
            times.append(time.perf_counter() - began)
    except OSError as error:
        fault = f"the vLLM server at {server.url} cannot be reached ({error}): is it started, and is its port open?"
        return server.url, "no connection", fault
    finding = f"{1000 * statistics.median(times):.1f} ms"
    try:
        server.get("/health", seconds=_SERVER_SECONDS)
        if not server.is_local and _is_open(server):
            fault = f"the vLLM server at {server.url} lets anyone change its weights: start it with GuardedRoutes"
            return server.url, f"{finding}, open to anyone", fault
        config = server.get("/server_info", seconds=_SERVER_SECONDS, config_format="json")["vllm_config"]
        backend = (config.get("weight_transfer_config") or {}).get("backend")
    except RejectedKey as error:
        return server.url, f"{finding}, rejected the key", f"{error}: set {key_variable} to that of the server"
    except (EngineDied, RunError, UsageError, KeyError, TypeError) as error:
        return server.url, f"{finding}, does not work", str(error)
    return server.url, f"{finding}, {config['model_config']['model']}, weights by {backend}", ""


def _is_open(server: VLLMServer) -> bool:
    """Return whether a server answers requests without a key."""
    try:
        server.get("/weight_info", with_key=False, seconds=_SERVER_SECONDS)
    except RejectedKey:
        return False
    return True
