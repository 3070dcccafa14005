"""How the front listens: HTTP without extras, from clients that do not take their time."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning_rlhf.serving.limits import HEADER_BYTES, Limits

_KEEP_SECONDS = 5
_GRACE_SECONDS = 5
_CONNECTIONS = 1024


class ImpatientProtocol(H11Protocol):
    """Hangs up on a connection whose request has not come whole, headers and all, when its time is over.

    uvicorn itself waits for ever for the first request of a connection, and for the rest of a header.
    """

    read_seconds = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait on where the request is not complete."""
        super().data_received(data)
        if self._idle:
            self._wait()
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.read_seconds, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if self._idle and not self.transport.is_closing():
            self.transport.close()


def listener(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """A server for the front; its sockets are given to ``serve``.

    Args:
        app: the front.
        limits: of requests.
    """
    protocol = type("Protocol", (ImpatientProtocol,), {"read_seconds": limits.read_seconds})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max(_CONNECTIONS, 4 * limits.concurrency),
        timeout_keep_alive=_KEEP_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES,
        backlog=_CONNECTIONS,
    )
    return uvicorn.Server(config)
