"""An HTTP server with OpenAI's chat API on loopback, for agents that generate their turns with the policy."""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LARGEST_BODY = 10_000_000  # bytes of a request
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


class AgentEndpoint:
    """Answers ``POST /v1/chat/completions``; the API key of a request selects the conversation.

    The server listens on 127.0.0.1 alone, and every conversation has its own random key.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.answers = self._answers
        threading.Thread(target=self._server.serve_forever, name="agent endpoint", daemon=True).start()

    @property
    def url(self) -> str:
        """Base URL for OpenAI's client, such as ``http://127.0.0.1:40001/v1``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def register(self, answer: Answer) -> str:
        """Return the key of a new conversation.

        Args:
            answer: function that is called with each of its requests, in the thread of the request.
        """
        key = secrets.token_hex(16)
        self._answers[key] = answer
        return key

    def remove(self, key: str) -> None:
        """Remove a conversation; later requests with its key are rejected."""
        self._answers.pop(key, None)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512
    answers: dict[str, Answer]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a client has closed, such as an agent that was ended."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients keep their connections
    server: _Server

    def do_GET(self) -> None:
        """List the only model."""
        if self._answer() is None:
            return
        if self.path.rstrip("/") != "/v1/models":
            self._refuse(404, f"there is no route {self.path}, only /v1/chat/completions and /v1/models")
            return
        self._send(200, {"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "trainer"}]})

    def do_POST(self) -> None:
        """Answer a request with a turn of the policy."""
        body = self._body()
        answer = self._answer()
        if answer is None or body is None:
            return
        if self.path.rstrip("/") != "/v1/chat/completions":
            self._refuse(404, f"there is no route {self.path}, only /v1/chat/completions and /v1/models")
            return
        try:
            result = answer(body).result()
        except RefusedRequest as error:
            self._refuse(400, str(error), error.code)
            return
        except BaseException:  # the rollout ends, and reports the error itself
            self._refuse(503, "the rollout has ended")
            return
        if body.get("stream"):
            self._stream(result)
        else:
            self._send(200, result)

    def _answer(self) -> Answer | None:
        """Return the function for the request's key, or reject the request."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        answer = self.server.answers.get(key.strip())
        if scheme.lower() != "bearer" or answer is None:
            self._refuse(401, "the API key belongs to no conversation", "invalid_api_key")
            return None
        return answer

    def _body(self) -> Body | None:
        """Return the JSON object of the request, or reject the request."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= _LARGEST_BODY:
            self.close_connection = True
            self._refuse(413, f"a request needs a Content-Length of at most {_LARGEST_BODY}")
            return None
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self._refuse(400, "the body must be a JSON object")
            return None
        return body

    def _refuse(self, status: int, message: str, code: str = "invalid_request") -> None:
        self._send(status, {"error": {"message": message, "type": "invalid_request_error", "code": code}})

    def _send(self, status: int, content: Body) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _stream(self, result: Body) -> None:
        """Send a finished response as events: its content in one, its end in another."""
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
        payload = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(payload.encode())))
        self.end_headers()
        self.wfile.write(payload.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
