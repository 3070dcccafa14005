"""What a vLLM server runs for us: a weight transfer of its own kind, and a guard for all its routes.

``vllm serve`` imports this module by the names on its command line (docs/rollouts.md). The transfer is vLLM's API with
another transport: where trainer and server share a machine, the weights go through the trainer's shared memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lightning_rlhf.rollout.vllm_extension import repack
from lightning_rlhf.rollout.weight_sync import SHARED_MEMORY, map_memory, read_slots

_SENDERS_MEMORY = re.compile(r"/proc/\d+/fd/\d+")


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """Every update says itself where its memory lies."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """The message of :class:`~lightning_rlhf.rollout.weight_sync.WeightSender`.

    Args:
        path: of the memory, ``/proc/<trainer>/fd/<n>``.
        nbytes: its size.
        layout: the parameters in it.
    """

    path: str
    nbytes: int
    layout: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if not _SENDERS_MEMORY.fullmatch(self.path):
            raise ValueError(f"weights come from the memory of a process, /proc/<process>/fd/<n>, not {self.path!r}")


class SharedMemoryTransfer(WeightTransferEngine[NothingToAgreeOn, SharedMemoryUpdate]):
    """Loads the weights from the trainer's shared memory."""

    init_info_cls = NothingToAgreeOn
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make ready to load layer by layer."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load all parameters."""
        memory = map_memory(update_info.path, update_info.nbytes)
        self.model.load_weights(read_slots(memory, update_info.layout))

    def finish_weight_update(self) -> None:
        """Process what was loaded, packed copies included."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Nothing to release: memory is unmapped with the last view of it."""


class SharedMemoryWorker:
    """Adds nothing to vLLM's worker: naming it on the command line makes the worker import this module."""


class GuardedRoutes(AuthenticationMiddleware):
    """Asks for the API key on every route. vLLM 0.32 itself leaves those that change the weights open to anyone.

    Args:
        app: to guard.

    Raises:
        ValueError: ``VLLM_API_KEY`` is not set.
    """

    def __init__(self, app: ASGIApp) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise ValueError("GuardedRoutes needs a key in the environment variable VLLM_API_KEY")
        super().__init__(app, [key])

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer 401 to who has no key."""
        if scope["type"] in ("http", "websocket") and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)


# vLLM loads plugins more than once in a process; the factory refuses a second registration.
if SHARED_MEMORY not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)
