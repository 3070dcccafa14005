"""Transfer of weights from the trainer's first rank to a vLLM server, with vLLM's weight-transfer API."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.rollout.vllm.server.client import VLLMServer
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, WeightSender

_CHUNK_BYTES = 256 * 2**20
_ALREADY_ACTIVE = "already active"  # in vLLM's answer to /start_weight_update while an update has not finished
Prepared = TypeVar("Prepared")  # weights as a transport sends them


class WeightPush(ABC, Generic[Prepared]):
    """One transport of the weight-transfer API.

    Args:
        server: server whose weights are replaced.
        has_images: whether the server reads images, whose features belong to the old weights.
    """

    def __init__(self, server: VLLMServer, has_images: bool = False) -> None:
        self._server = server
        self._has_images = has_images
        self._connected = False

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
        try:
            # Without clear_cache, vLLM 0.32 keeps the pictures; the caches that depend on weights are emptied below.
            query = {"mode": "wait"} | ({"clear_cache": "false"} if self._has_images else {})
            self._server.post("/pause", None, **query)
            self._replace(weights, label)
        except BaseException:  # also an interrupt: the server may be shared, and must not stay paused
            with suppress(RuntimeError, ValueError):  # report the first error
                self._server.post("/resume")
            raise
        self._server.post("/resume")

    def _replace(self, weights: Prepared, label: str) -> None:
        # The version is "unfinished" until the update is, so that tokens of a push that fails belong to no version.
        self._server.post("/update_weight_version", {"new_version": f"unfinished {label}"})
        if not self._connected:
            self._connect()
            self._connected = True
        self._begin()
        self._send(weights)
        # Before the update is finished, because the cache has values of the old weights.
        if not self._server.post("/reset_prefix_cache")["success"]:
            raise RunError(f"the vLLM server at {self._server.url} kept the prefix cache of the old weights")
        if self._has_images:
            self._server.post("/reset_encoder_cache")
        self._server.post("/finish_weight_update", {"weight_version": label})

    def _begin(self) -> None:
        try:
            self._server.post("/start_weight_update")
        except EngineDied as error:
            if _ALREADY_ACTIVE not in str(error):
                raise
            # An earlier push did not finish: end its update, whose weights are replaced now.
            self._server.post("/finish_weight_update")
            self._server.post("/start_weight_update")

    @abstractmethod
    def _connect(self) -> None:
        """Set up the transport on the server."""

    @abstractmethod
    def _prepare(self, parameters: Iterable[tuple[str, Tensor]]) -> Prepared:
        """Prepare the weights before the server is paused; return the argument of :meth:`_send`."""

    @abstractmethod
    def _send(self, weights: Prepared) -> None:
        """Send the weights; called between start and end of an update."""

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs from the last push; None if none does.

        Transports that do not keep the pushed weights cannot compare, and return None too.
        """
        return None

    def close(self) -> None:
        """Free local resources; the server keeps running."""


class SharedMemoryPush(WeightPush[dict[str, Any]]):
    """Transport through shared memory, for a server on the same machine that runs :mod:`.plugin`."""

    def __init__(self, server: VLLMServer, has_images: bool = False) -> None:
        super().__init__(server, has_images)
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


class NCCLPush(WeightPush[Iterable[tuple[str, Tensor]]]):
    """Transport from the first rank's GPU to the server's GPUs over NCCL; imports vLLM in the trainer's process."""

    def _connect(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = self._server.get("/get_world_size")["world_size"]
        address, port = _rendezvous(self._server)
        # Not packed, because packing needs two buffers of 1 GB.
        info = NCCLTrainerInitInfo(address, port, 1 + workers, packed=False, rank=0)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            info,
            client=_ChunkClient(self._server),
            source=_chunk_source([]),
        )

    def _prepare(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return parameters

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for pairs in chunks(weights, _CHUNK_BYTES):
            self._engine.source = _chunk_source(pairs)
            self._engine.send_weights()
            self._engine.source = _chunk_source([])  # frees the chunk before the next parameter is gathered
            del pairs

    def close(self) -> None:
        """Close the NCCL group."""
        if self._connected:
            self._engine.shutdown()
            self._connected = False


class _ChunkClient:
    """The client with which vLLM's trainer class sends one chunk.

    Its methods for start and finish do nothing, because :class:`WeightPush` starts and finishes one update around all
    chunks.
    """

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

    class Chunk(WeightSource):
        if hasattr(WeightSource, "iter_full"):  # since vLLM 0.33; earlier releases have other names for both

            @cached_property
            def metadata(self) -> list[Any]:
                return declared

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                return iter(pairs)

        else:

            def metadata(self) -> list[Any]:
                return declared

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(pairs)

    return Chunk()


def chunks(parameters: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield chunks of parameters, which are sent together, on the GPU if there is one.

    Args:
        parameters: (transformers name, tensor); each tensor is valid only until the next one.
        nbytes: largest size of a chunk; a larger parameter is a separate chunk, not copied if it is on the device.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in parameters:
        large = tensor.nbytes >= nbytes
        if chunk and (large or size + tensor.nbytes > nbytes):
            yield chunk
            chunk, size = [], 0
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
    with (
        socket.create_connection((server.host, server.port)) as connection,
        socket.socket(connection.family) as free,
    ):
        address = connection.getsockname()[0]
        free.bind((address, 0))
        return address, free.getsockname()[1]


# By the backend of the server's --weight-transfer-config.
PUSHES: dict[str, type[WeightPush[Any]]] = {SHARED_MEMORY: SharedMemoryPush, "nccl": NCCLPush}
