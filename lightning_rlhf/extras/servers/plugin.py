"""Plugin of a vLLM server: weight transfer through shared memory, and an API key check on all routes.

``vllm serve`` imports this module by the class names on its command line (docs/rollouts.md). The transfer implements
vLLM's weight-transfer API for a trainer on the same machine.
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
    """Message without fields, because every update contains the path of its memory."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """The message of :class:`~lightning_rlhf.rollout.vllm.sync.WeightSender`.

    Args:
        path: path of the memory, ``/proc/<trainer>/fd/<n>``.
        nbytes: size of the memory.
        layout: fields of each parameter's :class:`~lightning_rlhf.rollout.vllm.sync.Slot`.
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
        """Set up nothing, because the transfer needs no connection."""

    def start_weight_update(self) -> None:
        """Prepare the model for loading layer by layer."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load all parameters."""
        memory = map_memory(update_info.path, update_info.nbytes)
        self.model.load_weights(read_slots(memory, update_info.layout))

    def finish_weight_update(self) -> None:
        """Process the loaded weights and update packed copies of them."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Release nothing, because memory is unmapped with its last view."""


class SharedMemoryWorker:
    """Worker extension without methods; naming it on the command line makes vLLM's worker import this module."""


class GuardedRoutes(AuthenticationMiddleware):
    """Middleware that requires the API key on every route; vLLM 0.32 does not on routes that change weights.

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
        """Pass a request with the key to the application; respond to others with status 401."""
        if scope["type"] in ("http", "websocket") and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)


# vLLM may import a plugin more than once per process; a second registration would raise.
if SHARED_MEMORY not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)
