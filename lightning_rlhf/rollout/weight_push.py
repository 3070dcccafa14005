"""Weights from the trainer's first rank to a vLLM server, by vLLM's own weight-transfer API."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.rollout.engine import EngineDied
from lightning_rlhf.rollout.server_client import VLLMServer
from lightning_rlhf.rollout.weight_sync import SHARED_MEMORY, WeightSender

_CHUNK_BYTES = 1 << 28


class WeightPush(ABC):
    """One transport of the API.

    Args:
        server: whose weights are replaced.
    """

    def __init__(self, server: VLLMServer) -> None:
        self._server, self._open = server, False

    def __call__(self, parameters: Iterable[tuple[str, Tensor]], label: str) -> None:
        """Replace all weights between requests, and forget every cached prefix of the old ones.

        Args:
            parameters: (transformers name, tensor), each valid only until the next.
            label: what the server says from now on of which weights generated a token.

        Raises:
            RuntimeError: the prefix cache could not be emptied.
            EngineDied: the server failed; what it then generates carries neither the old nor the new label.
        """
        weights = self._prepare(parameters)
        self._server.post("/pause", mode="wait")
        try:
            self._replace(weights, label)
        except (RuntimeError, ValueError):
            with suppress(RuntimeError):  # the first fault is the one to tell
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
            raise RuntimeError(f"the vLLM server at {self._server.url} kept its prefix cache, which is of old weights")
        self._server.post("/finish_weight_update", {"weight_version": label})

    def _begin(self) -> None:
        try:
            self._server.post("/start_weight_update")
        except EngineDied as error:
            if "already active" not in str(error):
                raise
            self._server.post("/finish_weight_update")  # what a trainer that is gone began
            self._server.post("/start_weight_update")

    @abstractmethod
    def _connect(self) -> None:
        """Agree with the server on how the weights come."""

    def _prepare(self, parameters: Iterable[tuple[str, Tensor]]) -> Any:
        """What can be done while the server still generates; what :meth:`_send` is given."""
        return parameters

    @abstractmethod
    def _send(self, weights: Any) -> None:
        """Between start and end of an update."""

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Name of the first parameter that is not what was sent; None if that is not known."""
        return None

    def close(self) -> None:  # noqa: B027 (a transport may hold nothing)
        """Free what is held here; the server lives on."""


class SharedMemoryPush(WeightPush):
    """Through the memory of the machine that trainer and server share; the server runs :mod:`.vllm_transfer`."""

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
    """From the trainer's first GPU to those of the server, by vLLM's own classes, which this process then imports."""

    def _connect(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = self._server.get("/get_world_size")["world_size"]
        address, port = _rendezvous(self._server)
        # Unpacked: packing has two buffers of its own, each of a gigabyte.
        info = NCCLTrainerInitInfo(address, port, 1 + workers, packed=False, rank=0)
        self._chunk = _source()
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            info, client=_Chunks(self._server), source=self._chunk
        )

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for self._chunk.pairs in chunks(weights, _CHUNK_BYTES):
            self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        if self._open:
            self._engine.shutdown()
            self._open = False


class _Chunks:
    """The server as vLLM's trainer side wants it; start and end of the whole update are not those of a chunk."""

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


def _source() -> Any:
    """A source of parameters in vLLM's sense, whose ``pairs`` change from chunk to chunk."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Chunk(WeightSource):
        pairs: list[tuple[str, Tensor]]

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self.pairs)

    return Chunk()


def chunks(parameters: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The parameters on the GPU in pieces that are sent together.

    Args:
        parameters: (name, tensor), each valid only until the next.
        nbytes: at which a piece is full; larger parameters come alone, without a copy.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in parameters:
        alone = tensor.nbytes >= nbytes
        if kept and (alone or size + tensor.nbytes > nbytes):
            yield kept
            kept, size = [], 0
        if alone:
            yield [(name, tensor.detach().to(device))]
        else:
            kept.append((name, tensor.detach().to(device, copy=True)))
            size += tensor.nbytes
        del tensor  # or two would be held while the next is gathered
    if kept:
        yield kept


def _rendezvous(server: VLLMServer) -> tuple[str, int]:
    """An address of this machine that the server reaches, and a free port."""
    with socket.create_connection((server.host, server.port)) as towards, socket.socket() as free:
        address = towards.getsockname()[0]
        free.bind((address, 0))
        return address, free.getsockname()[1]


PUSHES: dict[str, type[WeightPush]] = {SHARED_MEMORY: SharedMemoryPush, "nccl": NCCLPush}
