"""Classes that a vLLM server loads for us: a weight transfer through shared memory, and a key check on all routes.

``vllm serve`` imports this module by the names on its command line (docs/rollouts.md). The transfer implements vLLM's
API: where trainer and server share a machine, the weights are read from the trainer's shared memory.
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

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rollout.vllm.receiver import repack
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, map_memory, read_slots

_MEMORY_PATH = re.compile(r"/proc/\d+/fd/\d+")


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Empty: every update contains the path of its memory."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """The message of :class:`~lightning_rlhf.rollout.vllm.sync.WeightSender`.

    Args:
        path: path of the memory, ``/proc/<trainer>/fd/<n>``.
        nbytes: size of the memory.
        layout: slots of the parameters in it.
    """

    path: str
    nbytes: int
    layout: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if not _MEMORY_PATH.fullmatch(self.path):
            raise UsageError(f"the path of the weights must be /proc/<process>/fd/<n>, got {self.path!r}")


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Weight transfer that loads from the trainer's shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Set nothing up: the transfer needs no connection."""

    def start_weight_update(self) -> None:
        """Prepare the model for loading layer by layer."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load all parameters."""
        memory = map_memory(update_info.path, update_info.nbytes)
        self.model.load_weights(read_slots(memory, update_info.layout))

    def finish_weight_update(self) -> None:
        """Process the loaded weights, and update packed copies of them."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Release nothing: memory is unmapped with the last view of it."""


class SharedMemoryWorker:
    """Empty extension of vLLM's worker, which imports this module because the command line names it."""


class GuardedRoutes(AuthenticationMiddleware):
    """Middleware that requires the API key on every route. vLLM 0.32 itself leaves those that change weights open.

    Args:
        app: application whose routes are guarded.

    Raises:
        ValueError: ``VLLM_API_KEY`` is not set.
    """

    def __init__(self, app: ASGIApp) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise UsageError("GuardedRoutes needs a key in the environment variable VLLM_API_KEY")
        super().__init__(app, [key])

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass on a request with the key; respond 401 to others."""
        if scope["type"] in ("http", "websocket") and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)


# vLLM loads plugins more than once in a process; the factory refuses a second registration.
if SHARED_MEMORY not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)
