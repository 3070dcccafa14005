"""An HTTP server with OpenAI's chat API on loopback, for agents that generate their turns with the policy."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lightning_rlhf.expected_errors import MissingPackageError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    raise MissingPackageError(
        f"agents need the package {str(missing.name).partition('.')[0]}: run pip install 'lightning-rlhf[agents]'"
    ) from missing

_LARGEST_BODY = 10_000_000  # bytes of a request
_BODY_SECONDS = 60.0  # time in which the whole body must arrive
_IDLE_SECONDS = 60  # time after which a connection without a further request is closed
_MOST_CONNECTIONS = 4096
_MOST_LEVELS = 100  # of nested values in a request; deeper ones would exceed Python's recursion limit elsewhere
_CLOSE_SECONDS = 10.0
_MODEL = "policy"
Body = dict[str, Any]
Answer = Callable[[Body], "Future[Body]"]  # called with a request's body; its result is that of the response


class RefusedRequest(Exception):
    """Error for a request that cannot be answered; the client gets its text with status 400.

    Args:
        message: description for the agent.
        code: code of OpenAI's API, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class _UnreadBody(RefusedRequest):
    """A request whose body was not read to its end, so that no other request can follow on its connection."""


class AgentEndpoint:
    """Answers ``POST /v1/chat/completions``; the API key of a request selects the conversation.

    The server listens on 127.0.0.1 alone, and every conversation has its own random key.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        application = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _wrong_route},
        )
        config = uvicorn.Config(
            application,
            http="h11",  # is there wherever uvicorn is, so that requests are read alike everywhere
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_keep_alive=_IDLE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="agent endpoint", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL for OpenAI's client, such as ``http://127.0.0.1:40001/v1``."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    def register(self, answer: Answer) -> str:
        """Return the key of a new conversation.

        Args:
            answer: function that is called with each of its requests, in the thread of the server.
        """
        key = secrets.token_hex(16)
        self._answers[key] = answer
        return key

    def remove(self, key: str) -> None:
        """Remove a conversation; later requests with its key are rejected."""
        self._answers.pop(key, None)

    def close(self) -> None:
        """End the server, and the requests that wait for an answer."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_CLOSE_SECONDS)

    async def _models(self, request: Request) -> Response:
        """List the only model."""
        if self._answer_to(request) is None:
            return _wrong_key()
        return JSONResponse({"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "trainer"}]})

    async def _chat(self, request: Request) -> Response:
        """Answer a request with a turn of the policy."""
        answer = self._answer_to(request)
        if answer is None:
            return _wrong_key()
        try:
            body = await _body_of(request)
            result = await asyncio.wrap_future(answer(body))
        except RefusedRequest as error:
            refusal = _refusal(400, str(error), error.code)
            if isinstance(error, _UnreadBody):
                refusal.headers["Connection"] = "close"
            return refusal
        except (Exception, asyncio.CancelledError):  # the rollout ends, and reports the error itself
            return _refusal(503, "the rollout has ended")
        if body.get("stream"):
            return Response(_events(result), media_type="text/event-stream")
        return JSONResponse(result)

    def _answer_to(self, request: Request) -> Answer | None:
        """Return the function for the key of a request; None for a wrong key."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._answers.get(key.strip()) if scheme.lower() == "bearer" else None


async def _body_of(request: Request) -> Body:
    """Return the JSON object of a request.

    Raises:
        RefusedRequest: it is too large, too slow, nested too deeply, or no JSON object.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > _LARGEST_BODY:
                    raise _UnreadBody(f"a request has at most {_LARGEST_BODY} bytes")
    except TimeoutError as error:
        raise _UnreadBody(f"the body of the request did not arrive in {_BODY_SECONDS:g} seconds") from error
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusedRequest("the body must be a JSON object")
    if _is_nested_deeper(body, _MOST_LEVELS):
        raise RefusedRequest(f"the body is nested more than {_MOST_LEVELS} levels deep")
    return body


def _wrong_route(request: Request, error: Exception) -> Response:
    return _refusal(404, f"there is no route {request.url.path}, only /v1/chat/completions and /v1/models")


def _wrong_key() -> Response:
    return _refusal(401, "the API key belongs to no conversation", "invalid_api_key")


def _refusal(status: int, message: str, code: str = "invalid_request") -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": code}}, status)


def _events(result: Body) -> str:
    """Return a finished response as events: its content in one, its end in another."""
    (choice,) = result["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls") or [])]
    first = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    chunks = [
        {"index": 0, "delta": first, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
    ]
    events = [
        {**{name: result[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
        | {"choices": [chunk]}
        for chunk in chunks
    ]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Return whether a JSON value has more levels of lists and objects, without recursion."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [each for each in layer if isinstance(each, list | dict)]
        layer = [part for each in containers for part in (each.values() if isinstance(each, dict) else each)]
        if not containers:
            return False
    return True
