"""The front: asks for the key, lets five routes through, and keeps every request within limits."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import anyio
import httpx
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lightning_rlhf.serving.limits import HEADER_BYTES, Limits, Refused, check, parsed, set_by

HEALTH = "/health"
_GENERATES = ("/v1/completions", "/v1/chat/completions")
ROUTES = {HEALTH: "GET", "/metrics": "GET", "/v1/models": "GET", **dict.fromkeys(_GENERATES, "POST")}
_ASK_SECONDS = 10.0
_END_SECONDS = 1.0
_JSON = {"content-type": "application/json"}


class _Gone(Exception):
    """The client hung up."""


class Front:
    """An ASGI application before a vLLM server.

    Only what was parsed and checked is written anew and passed on, to an address that does not depend on the request:
    no other route, field, header or query of the server can be reached.

    Args:
        client: reaches the server.
        key: that every request but ``GET /health`` must bear.
        limits: of requests.
        count: tokens of a text.
    """

    def __init__(self, client: httpx.AsyncClient, key: str, limits: Limits, count: Callable[[str], int]) -> None:
        self._client, self._limits, self._count = client, limits, count
        self._key = _hashed(f"Bearer {key}")
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            with anyio.fail_after(self._limits.seconds):
                await self._answer(scope, receive, watched)
        except Refused as reason:
            await _refusal(reason, scope["path"])(scope, receive, send)
        except TimeoutError:
            late = Refused(504, f"not done in {self._limits.seconds:g} s: ask for less{set_by('seconds')}")
            if not started:
                await _refusal(late, scope["path"])(scope, receive, send)
            else:
                await _end_stream(send, late)
        except _Gone:
            return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        # The protocol bounds only headers that come in pieces.
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("query_string", b""))
        if size + len(path) > HEADER_BYTES:
            raise Refused(431, f"the headers and the address of a request may have {HEADER_BYTES} bytes")
        if scope.get("raw_path", b"").split(b"?")[0] != path.encode():
            path = ""  # what is written in another way than it is meant is no route
        if path != HEALTH and not self._has_key(headers):
            raise Refused(401, "this server wants a key: Authorization: Bearer ...")
        if path not in ROUTES:
            raise Refused(404, f"there is no such route; there are {', '.join(ROUTES)}")
        if scope["method"] != ROUTES[path]:
            raise Refused(405, f"{path} takes {ROUTES[path]}")
        if path in _GENERATES:
            await self._generate(path, headers, receive, send)
        else:
            await (await self._look(path))(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        given = headers.getlist("authorization")
        # Hashes have one length, so that not even the key's length can be timed.
        return hmac.compare_digest(_hashed(given[0] if len(given) == 1 else ""), self._key)

    async def _look(self, path: str) -> Response:
        """What takes no work."""
        try:
            with anyio.fail_after(_ASK_SECONDS):
                answer = await self._client.get(path)
        except (httpx.TransportError, TimeoutError) as error:
            raise Refused(503, "the model is not ready") from error
        if path == HEALTH:
            ready = answer.status_code == 200
            return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _generate(self, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        if self._under_way >= self._limits.concurrency:
            busy = f"{self._limits.concurrency} requests are under way: come again"
            raise Refused(429, busy + set_by("concurrency"))
        self._under_way += 1
        refused: Refused | None = None
        try:
            body = parsed(await self._read(headers, receive))
            await anyio.to_thread.run_sync(check, path, body, self._limits, self._count)
            async with anyio.create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                refused = await self._pass_on(path, body, send)
                group.cancel_scope.cancel()
        finally:
            self._under_way -= 1
        if refused is not None:
            raise refused

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        most = self._limits.max_body_bytes
        too_long = Refused(413, f"a body may have {most} bytes{set_by('max_body_bytes')}")
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")[:19]) > most:
            raise too_long
        body = b""
        try:
            with anyio.fail_after(self._limits.read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_long
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            late = f"the body did not come in {self._limits.read_seconds:g} s"
            raise Refused(408, late + set_by("read_seconds")) from None

    async def _pass_on(self, path: str, body: dict[str, Any], send: Send) -> Refused | None:
        """Ask the server and hand its answer on, as it comes where a stream is asked for; what else is to be said."""
        started = False
        try:
            async with self._client.stream("POST", path, content=json.dumps(body), headers=_JSON) as answer:
                if not body.get("stream"):
                    await answer.aread()
                kind = answer.headers.get("content-type", "application/json").encode()
                headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
                started = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                async for part in answer.aiter_bytes():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError:
            if not started:
                return Refused(503, "the model is not ready, or is gone")
            await _end_stream(send, Refused(502, "the model is gone"))
        return None


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    """Stop working for a client that hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _end_stream(send: Send, reason: Refused) -> None:
    """Say it to a client that reads; one that does not is not waited for."""
    event = f"data: {json.dumps(_error(reason))}\n\n".encode()
    with anyio.move_on_after(_END_SECONDS):
        await send({"type": "http.response.body", "body": event, "more_body": False})


def _refusal(reason: Refused, path: str) -> Response:
    headers = {"cache-control": "no-store"}
    if reason.status == 405:
        headers["allow"] = ROUTES[path]
    if reason.status == 401:
        headers["www-authenticate"] = "Bearer"
    if reason.status in (429, 503):
        headers["retry-after"] = "1"
    return JSONResponse(_error(reason), reason.status, headers)


def _error(reason: Refused) -> dict[str, Any]:
    return {"error": {"message": str(reason), "type": "refused", "code": reason.status}}


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
