"""Transfer of weights from the trainer's first rank to a vLLM server, with vLLM's weight-transfer API."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.rollout.vllm.server.client import VLLMServer
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, WeightSender

_CHUNK_BYTES = 256 * 2**20


class WeightPush(ABC):
    """One transport of the weight-transfer API.

    Args:
        server: server whose weights are replaced.
    """

    def __init__(self, server: VLLMServer) -> None:
        self._server = server
        self._open = False

    def __call__(self, parameters: Iterable[tuple[str, Tensor]], label: str) -> None:
        """Replace all weights between requests and reset the prefix cache.

        Args:
            parameters: (transformers name, tensor); each tensor is valid only until the next one.
            label: version label of tokens that are generated with the new weights.

        Raises:
            RuntimeError: the prefix cache could not be reset.
            EngineDied: the server failed; tokens that it generates later are labelled ``unfinished``.
        """
        weights = self._prepare(parameters)
        self._server.post("/pause", mode="wait")
        try:
            self._replace(weights, label)
        except (RuntimeError, ValueError):
            with suppress(RuntimeError):  # report the first error
                self._server.post("/resume")
            raise
        self._server.post("/resume")

    def _replace(self, weights: Any, label: str) -> None:
        self._server.post("/update_weight_version", {"new_version": f"unfinished {label}"})
        if not self._open:
            self._connect()
            self._open = True
        self._begin()
        self._send(weights)
        if not self._server.post("/reset_prefix_cache")["success"]:
            raise RunError(f"the vLLM server at {self._server.url} kept the prefix cache of the old weights")
        self._server.post("/finish_weight_update", {"weight_version": label})

    def _begin(self) -> None:
        try:
            self._server.post("/start_weight_update")
        except EngineDied as error:
            if "already active" not in str(error):
                raise
            self._server.post("/finish_weight_update")  # update of a trainer that died during a push
            self._server.post("/start_weight_update")

    @abstractmethod
    def _connect(self) -> None:
        """Set up the transport on the server."""

    def _prepare(self, parameters: Iterable[tuple[str, Tensor]]) -> Any:
        """Prepare the weights before the server is paused; return the argument of :meth:`_send`."""
        return parameters

    @abstractmethod
    def _send(self, weights: Any) -> None:
        """Send the weights; called between start and end of an update."""

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs from the last push; None if no difference is known."""
        return None

    def close(self) -> None:  # noqa: B027 (not every transport has local resources)
        """Free local resources; the server keeps running."""


class SharedMemoryPush(WeightPush):
    """Transport through shared memory, for a server on the same machine that runs :mod:`.plugin`."""

    def __init__(self, server: VLLMServer) -> None:
        super().__init__(server)
        self._sender = WeightSender()

    def _connect(self) -> None:
        self._server.post("/init_weight_transfer_engine", {"init_info": {}})

    def _prepare(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        return self._sender.write(parameters)

    def _send(self, weights: dict[str, Any]) -> None:
        self._server.post("/update_weights", {"update_info": weights})

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`WeightPush.first_difference`."""
        return self._sender.first_difference(parameters)

    def close(self) -> None:
        """Free the memory."""
        self._sender.close()


class NCCLPush(WeightPush):
    """Transport from the first rank's GPU to the server's GPUs over NCCL; imports vLLM in the trainer's process."""

    def _connect(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = self._server.get("/get_world_size")["world_size"]
        address, port = _rendezvous(self._server)
        # Not packed, because packing needs two buffers of 1 GB.
        info = NCCLTrainerInitInfo(address, port, 1 + workers, packed=False, rank=0)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            info, client=_ChunkClient(self._server), source=_chunk_source([])
        )

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for pairs in chunks(weights, _CHUNK_BYTES):
            self._engine.source = _chunk_source(pairs)
            self._engine.send_weights()

    def close(self) -> None:
        """Close the NCCL group."""
        if self._open:
            self._engine.shutdown()
            self._open = False


class _ChunkClient:
    """Client for vLLM's trainer class, which sends one chunk; start and end of the update are left to the caller."""

    def __init__(self, server: VLLMServer) -> None:
        self._server = server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._server.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._server.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _chunk_source(pairs: list[tuple[str, Tensor]]) -> Any:
    """Return a ``WeightSource`` of vLLM with the tensors of one chunk."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    declared = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
    members: dict[str, Any]
    if hasattr(WeightSource, "iter_full"):  # vLLM 0.33
        members = {"metadata": cached_property(lambda source: declared), "iter_full": lambda source: iter(pairs)}
    else:  # earlier releases
        members = {"metadata": lambda source: declared, "__iter__": lambda source: iter(pairs)}
    return type("Chunk", (WeightSource,), members)()


def chunks(parameters: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield chunks of parameters on the GPU, which are sent together.

    Args:
        parameters: (name, tensor); each tensor is valid only until the next one.
        nbytes: largest size of a chunk; a larger parameter is a separate chunk and is not copied.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in parameters:
        large = tensor.nbytes >= nbytes
        if chunk and (large or size + tensor.nbytes > nbytes):
            yield chunk
            chunk = []
            size = 0
        if large:
            yield [(name, tensor.detach().to(device))]
        else:
            chunk.append((name, tensor.detach().to(device, copy=True)))
            size += tensor.nbytes
        del tensor  # free it before the next one is gathered
    if chunk:
        yield chunk


def _rendezvous(server: VLLMServer) -> tuple[str, int]:
    """Return an address of this machine that the server can reach, and a free port."""
    with socket.create_connection((server.host, server.port)) as connection, socket.socket() as free:
        address = connection.getsockname()[0]
        free.bind((address, 0))
        return address, free.getsockname()[1]


PUSHES: dict[str, type[WeightPush]] = {SHARED_MEMORY: SharedMemoryPush, "nccl": NCCLPush}
