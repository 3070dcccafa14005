"""Transfer of weights from the trainer's first rank to vLLM servers, with vLLM's weight-transfer API."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.expected_errors import EngineDied, RunError
from lightning_rlhf.extras.servers.client import VLLMServer
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, WeightSender

_CHUNK_BYTES = 256 * 2**20
_ALREADY_ACTIVE = "already active"  # in vLLM's answer to /start_weight_update while an update has not finished
_RESUME_SECONDS = 30.0
_THREADS = 64  # largest number of servers that load weights at the same time
Part = TypeVar("Part")  # weights in one request for an update


class Transport(ABC, Generic[Part]):
    """One transport of the weight-transfer API, for any number of servers."""

    at_once: ClassVar[bool]  # whether several servers receive a part at the same time, each in a separate thread
    keeps_weights: ClassVar[bool]  # whether the last weights can be sent again

    @abstractmethod
    def parts(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[Part]:
        """Yield at least one part of the weights; the servers are paused after the first one is prepared.

        Args:
            parameters: (transformers name, tensor); each tensor is valid only until the next one.
        """

    @abstractmethod
    def connect(self, server: VLLMServer) -> None:
        """Set up the transport on a server, before its first update."""

    @abstractmethod
    def send(self, server: VLLMServer, part: Part) -> None:
        """Send a part; called between start and end of an update."""

    def last_weights(self) -> Part:
        """Return the last weights as one part; only for transports that keep them."""
        raise NotImplementedError(f"{type(self).__name__} keeps no weights")

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs from the last push; None if none does.

        Transports that do not keep the pushed weights cannot compare, and return None too.
        """
        return None

    def disconnect(self, server: VLLMServer) -> None:
        """Free local resources for a server."""

    def close(self) -> None:
        """Free local resources; the servers keep running."""


class SharedMemoryTransport(Transport[dict[str, Any]]):
    """Transport through shared memory, for servers on the same machine that run :mod:`.plugin`."""

    at_once = True
    keeps_weights = True

    def __init__(self) -> None:
        self._sender = WeightSender()

    @override
    def parts(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """All weights are one part."""
        yield self._sender.write(parameters)

    @override
    def connect(self, server: VLLMServer) -> None:
        _confirmed(server, "/init_weight_transfer_engine", {"init_info": {}})

    @override
    def send(self, server: VLLMServer, part: dict[str, Any]) -> None:
        _confirmed(server, "/update_weights", {"update_info": part})

    @override
    def last_weights(self) -> dict[str, Any]:
        return self._sender.message

    @override
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        return self._sender.first_difference(parameters)

    def close(self) -> None:
        """Free the memory."""
        self._sender.close()


class NCCLTransport(Transport[list[tuple[str, Tensor]]]):
    """Transport from the first rank's GPU to the GPUs of each server by NCCL; imports vLLM in the trainer's process."""

    at_once = False  # CUDA's current device is that of the trainer's thread
    keeps_weights = False

    def __init__(self) -> None:
        self._engines: dict[VLLMServer, Any] = {}

    @override
    def parts(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """A part has at most 256 MiB or is one parameter."""
        return chunks(parameters, _CHUNK_BYTES)

    @override
    def connect(self, server: VLLMServer) -> None:
        """Trainer and workers of the server form a group of NCCL."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = server.get("/get_world_size")["world_size"]
        address, port = _rendezvous(server)
        # Not packed, because packing needs two buffers of 1 GB.
        info = NCCLTrainerInitInfo(address, port, 1 + workers, packed=False, rank=0)
        self._engines[server] = WeightTransferTrainerFactory.trainer_init(
            info, client=_ChunkClient(server), source=_chunk_source([])
        )

    @override
    def send(self, server: VLLMServer, part: list[tuple[str, Tensor]]) -> None:
        engine = self._engines[server]
        engine.source = _chunk_source(part)
        engine.send_weights()
        engine.source = _chunk_source([])  # frees the chunk before the next parameter is gathered

    def disconnect(self, server: VLLMServer) -> None:
        """Close the group with a server."""
        if (engine := self._engines.pop(server, None)) is not None:
            engine.shutdown()

    def close(self) -> None:
        """Close all groups."""
        for server in list(self._engines):
            self.disconnect(server)


class WeightPush:
    """Replaces the weights of servers.

    Args:
        transport: way of the weights to all servers.
        has_images: whether the servers read images, whose features belong to the old weights.
    """

    def __init__(self, transport: Transport[Any], has_images: bool = False) -> None:
        self.transport = transport
        self._has_images = has_images
        self._connected = set[VLLMServer]()
        self._updating = set[VLLMServer]()  # which have begun an update and not finished it
        self._threads = DaemonThreads(_THREADS, "weight push")

    def __call__(
        self, servers: Sequence[VLLMServer], parameters: Iterable[tuple[str, Tensor]], label: str
    ) -> dict[VLLMServer, EngineDied]:
        """Replace all weights of some servers between their requests, and reset their prefix caches.

        Args:
            servers: servers; without any, a transport that keeps weights keeps these.
            parameters: (transformers name, tensor); each tensor is valid only until the next one.
            label: version label of tokens that are generated with the new weights.

        Returns:
            The servers that failed, with their errors; tokens that they generate later are labelled ``unfinished``.

        Raises:
            RuntimeError: a prefix cache could not be reset.
        """
        return self._replace(servers, self.transport.parts(parameters), label)

    def repeat(self, server: VLLMServer, label: str) -> None:
        """Replace the weights of one server by those of the last push, if the transport keeps them.

        Args:
            server: a server that was started again, or has joined the run.
            label: version label of the last push.

        Raises:
            EngineDied: the server failed.
        """
        self.disconnect(server)
        for error in self._replace([server], iter([self.transport.last_weights()]), label).values():
            raise error

    def _replace(self, servers: Sequence[VLLMServer], parts: Iterator[Any], label: str) -> dict[VLLMServer, EngineDied]:
        failed: dict[VLLMServer, EngineDied] = {}
        begun = False
        try:
            for part in parts:
                if not begun:
                    begun = True
                    self._each(servers, partial(self._begin, label=label), failed)
                self._each(servers, partial(self.transport.send, part=part), failed)
                del part  # free it before the next one is gathered
            self._each(servers, partial(self._finish, label=label), failed)
        finally:  # also after an interrupt: a server may be shared, and must not stay paused
            if begun:
                for server in servers:
                    try:
                        self.resume(server)
                    except (RuntimeError, ValueError) as error:  # it may still be paused
                        failed.setdefault(server, EngineDied(str(error)))
        return failed

    def resume(self, server: VLLMServer) -> None:
        """Let a server generate again after a push; raises as :meth:`VLLMServer.post`."""
        server.post("/resume", seconds=_RESUME_SECONDS)

    def _each(
        self, servers: Sequence[VLLMServer], action: Callable[[VLLMServer], None], failed: dict[VLLMServer, EngineDied]
    ) -> None:
        """Call an action for each server that has not failed; add those that fail.

        They are disconnected at once: a transfer on a GPU to a server that does not receive it would delay all others.
        """
        remaining = [server for server in servers if server not in failed]
        submit = self._threads.submit if self.transport.at_once and len(remaining) > 1 else _called
        results = [(server, submit(action, server)) for server in remaining]
        errors = [(server, error) for server, result in results if (error := result.exception()) is not None]
        for server, error in errors:
            self.disconnect(server)
            failed[server] = error if isinstance(error, EngineDied) else EngineDied(str(error))
        for _, error in errors:
            if not isinstance(error, EngineDied):
                raise error

    def _begin(self, server: VLLMServer, label: str) -> None:
        # Without clear_cache, vLLM 0.32 keeps the pictures; the caches that depend on weights are emptied below.
        if self._has_images:
            server.post("/pause", mode="wait", clear_cache="false")
        else:
            server.post("/pause", mode="wait")
        # The version is "unfinished" until the update is, so that tokens of a push that fails belong to no version.
        server.post("/update_weight_version", {"new_version": f"unfinished {label}"})
        if server not in self._connected:
            self.transport.connect(server)
            self._connected.add(server)
        is_active = False
        try:
            _confirmed(server, "/start_weight_update")
        except EngineDied as error:
            if _ALREADY_ACTIVE not in str(error):
                raise
            is_active = True
        if is_active or server in self._updating:
            # An earlier push did not finish: end its update, of whose weights vLLM may have counted some.
            _confirmed(server, "/finish_weight_update")
            _confirmed(server, "/start_weight_update")
        self._updating.add(server)

    def _finish(self, server: VLLMServer, label: str) -> None:
        # Before the update is finished, because the cache has values of the old weights.
        reset = server.post("/reset_prefix_cache")
        if not isinstance(reset, dict) or "success" not in reset:
            raise EngineDied(f"the vLLM server at {server.url} sent an invalid response at /reset_prefix_cache")
        if not reset["success"]:
            raise RunError(f"the vLLM server at {server.url} kept the prefix cache of the old weights")
        if self._has_images:
            server.post("/reset_encoder_cache")
        _confirmed(server, "/finish_weight_update", {"weight_version": label})
        self._updating.discard(server)

    def disconnect(self, server: VLLMServer) -> None:
        """Discard the connection to a server that has ended."""
        self._connected.discard(server)
        self.transport.disconnect(server)

    def close(self) -> None:
        """Free local resources; the servers keep running."""
        self.transport.close()
        self._threads.close()


def _confirmed(server: VLLMServer, path: str, body: Any = None) -> None:
    """Send a step of a push, and validate that the server confirms it.

    Args:
        path: route.
        body: content of the request.

    Raises:
        EngineDied: the response is not that of vLLM, so the server may not have done the step.
    """
    reply = server.post(path, body)
    if not isinstance(reply, dict) or "message" not in reply:
        raise EngineDied(f"the vLLM server at {server.url} sent an invalid response at {path}")


def _called(action: Callable[[VLLMServer], None], server: VLLMServer) -> Future[None]:
    """Call an action now; return its result as a future."""
    future = Future[None]()
    try:
        action(server)
        future.set_result(None)
    except (RuntimeError, ValueError) as error:  # read by the caller
        future.set_exception(error)
    return future


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
        _confirmed(self._server, "/update_weights", {"update_info": update_info})

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
TRANSPORTS: dict[str, type[Transport[Any]]] = {SHARED_MEMORY: SharedMemoryTransport, "nccl": NCCLTransport}
