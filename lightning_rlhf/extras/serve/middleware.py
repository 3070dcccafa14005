"""ASGI middleware of the server, which enforces API key, routes, request limits and time limits."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_rlhf.extras.serve.limits import (
    BODIES,
    HEADER_BYTES,
    HEADERS_TOO_LONG,
    Limits,
    Rejected,
    check,
    option_hint,
    parse,
)

HEALTH = "/health"
ROUTES = {HEALTH: "GET", "/metrics": "GET", "/v1/models": "GET", **dict.fromkeys(BODIES, "POST")}
_END_SECONDS = 1.0


class _ClientDisconnected(Exception):
    """The client closed the connection before the end of its request."""


class RequestGuard:
    """Middleware that passes only validated requests with the API key, and only to the routes in :data:`ROUTES`.

    The application receives the validated body, encoded again, but not the client's headers and query parameters.

    Args:
        app: application, such as vLLM's.
        key: API key that every request but ``GET /health`` must have.
        limits: limits of requests.
        count_tokens: function that returns the number of tokens of a text.
    """

    def __init__(self, app: ASGIApp, key: str, limits: Limits, count_tokens: Callable[[str], int]) -> None:
        self._app = app
        self._key = _digest(f"Bearer {key}")
        self._limits = limits
        self._count_tokens = count_tokens
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; no route has websockets."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._respond_in_time(scope, receive, send)

    async def _respond_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            with anyio.move_on_after(self._limits.seconds) as time_limit:
                await self._respond(scope, receive, tracked_send)
        except Rejected as rejected:
            await _error_response(rejected, scope["path"])(scope, receive, send)
        except _ClientDisconnected:
            return
        if time_limit.cancelled_caught:
            hint = option_hint("seconds")
            late = Rejected(
                504, f"not finished in {self._limits.seconds:g} s: request fewer or shorter responses{hint}"
            )
            if started:
                await _end_stream(send, late)
            else:
                await _error_response(late, scope["path"])(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path = self._checked_path(scope, headers)
        if path in BODIES:
            await self._generate(path, scope, receive, send)
        else:
            await self._app(_clean_scope(scope, b""), _receive_once(b""), _clean_send(send))

    def _checked_path(self, scope: Scope, headers: Headers) -> str:
        path: str = scope["path"]
        # uvicorn's parser limits only headers that arrive in several pieces.
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("query_string", b""))
        if size + len(path) > HEADER_BYTES:
            raise Rejected(431, HEADERS_TOO_LONG)
        if scope.get("raw_path", b"").split(b"?")[0] != path.encode():
            path = ""  # reject percent-encoded paths as unknown routes
        if path != HEALTH and not self._has_key(headers):
            raise Rejected(401, 'missing or invalid API key; send "Authorization: Bearer <key>"')
        if path not in ROUTES:
            raise Rejected(404, f"unknown route; available: {', '.join(ROUTES)}")
        if scope["method"] != ROUTES[path]:
            raise Rejected(405, f"{path} supports {ROUTES[path]} only")
        return path

    def _has_key(self, headers: Headers) -> bool:
        values = headers.getlist("authorization")
        # Compare digests, which have equal lengths, so that timing does not reveal the length of the key.
        return hmac.compare_digest(_digest(values[0] if len(values) == 1 else ""), self._key)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self._running >= self._limits.concurrency:
            busy = f"too many concurrent requests (limit {self._limits.concurrency}); retry later"
            raise Rejected(429, busy + option_hint("concurrency"))
        self._running += 1
        try:
            body = parse(await self._read_body(Headers(scope=scope), receive))
            await anyio.to_thread.run_sync(check, path, body, self._limits, self._count_tokens)
            content = json.dumps(body).encode()
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_on_disconnect, receive, group.cancel_scope)
                await self._app(_clean_scope(scope, content), _receive_once(content), _clean_send(send))
                group.cancel_scope.cancel()
        finally:
            self._running -= 1

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        too_long = Rejected(413, f"a body may have at most {limit} bytes{option_hint('max_body_bytes')}")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:19]) > limit:  # Python refuses to read a number of thousands of digits
            raise too_long
        body = b""
        with anyio.move_on_after(self._limits.read_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientDisconnected
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_long
                if not message.get("more_body", False):
                    return body
        late = f"the body was not received within {self._limits.read_seconds:g} s"
        raise Rejected(408, late + option_hint("read_seconds"))


def _clean_scope(scope: Scope, body: bytes) -> Scope:
    """Return the scope without the client's headers and query parameters."""
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return {**scope, "headers": headers, "query_string": b""}


def _receive_once(body: bytes) -> Receive:
    """Return a ``receive`` that returns the body once and then blocks; disconnects are handled by cancellation."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await anyio.sleep_forever()
        return messages.pop()

    return receive


def _clean_send(send: Send) -> Send:
    """Return a ``send`` that removes response headers of the application other than content type and length."""

    async def clean_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            content = [pair for pair in message["headers"] if pair[0].lower() in (b"content-type", b"content-length")]
            message = {**message, "headers": [*content, (b"cache-control", b"no-store")]}
        await send(message)

    return clean_send


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _end_stream(send: Send, rejected: Rejected) -> None:
    """Send an error as the last event of a stream, with a time limit for clients that do not read."""
    event = f"data: {json.dumps(error_body(rejected))}\n\n".encode()
    with anyio.move_on_after(_END_SECONDS):
        await send({"type": "http.response.body", "body": event, "more_body": False})


def _error_response(rejected: Rejected, path: str) -> Response:
    headers = {"cache-control": "no-store"}
    if rejected.status == 405:
        headers["allow"] = ROUTES[path]
    if rejected.status == 401:
        headers["www-authenticate"] = "Bearer"
    if rejected.status == 429:
        headers["retry-after"] = "1"
    return JSONResponse(error_body(rejected), rejected.status, headers)


def error_body(rejected: Rejected) -> dict[str, Any]:
    """Return the JSON of a response that rejects a request."""
    return {"error": {"message": str(rejected), "type": "rejected", "code": rejected.status}}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
