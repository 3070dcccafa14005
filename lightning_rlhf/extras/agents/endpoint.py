"""An HTTP server with OpenAI's chat API on loopback, for agents that generate their turns with the policy."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LARGEST_BODY = 10_000_000  # bytes of a request
_BODY_SECONDS = 60.0  # time in which the whole body must arrive
_SILENCE_SECONDS = 60.0  # time after which a connection without a byte is closed
_MOST_CONNECTIONS = 4096  # each has a thread
_MOST_LEVELS = 100  # of nested values in a request; deeper ones would exceed Python's recursion limit elsewhere
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

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections = 0
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection; close the connection if there are too many."""
        with self._lock:
            allowed = self.connections < _MOST_CONNECTIONS
            self.connections += allowed
        if allowed:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection until it is closed."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self.connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a client has closed, such as an agent that was ended."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients keep their connections
    timeout = _SILENCE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """List the only model."""
        if self._answer() is None or not self._has_path("/v1/models"):
            return
        self._send(200, {"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "trainer"}]})

    def do_POST(self) -> None:
        """Answer a request with a turn of the policy."""
        answer = self._answer()
        if answer is None or not self._has_path("/v1/chat/completions") or (body := self._body()) is None:
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
        """Return the function for the request's key, or reject the request without reading its body."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        answer = self.server.answers.get(key.strip())
        if scheme.lower() != "bearer" or answer is None:
            self._discard_body()
            self._refuse(401, "the API key belongs to no conversation", "invalid_api_key")
            return None
        return answer

    def _has_path(self, path: str) -> bool:
        """Return whether the request has a path, or reject the request."""
        if self.path.rstrip("/") == path:
            return True
        self._discard_body()
        self._refuse(404, f"there is no route {self.path}, only /v1/chat/completions and /v1/models")
        return False

    def _body(self) -> Body | None:
        """Return the JSON object of the request, or reject the request."""
        length = self._length
        if length is None:
            self.close_connection = True
            self._refuse(413, f"a request needs a Content-Length of at most {_LARGEST_BODY}")
            return None
        try:
            body = json.loads(b"".join(self._parts(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self._refuse(400, "the body must be a JSON object")
            return None
        if _is_nested_deeper(body, _MOST_LEVELS):
            self._refuse(400, f"the body is nested more than {_MOST_LEVELS} levels deep")
            return None
        return body

    @property
    def _length(self) -> int | None:
        """Bytes of the body; None if they are unknown or too many."""
        text = self.headers.get("Content-Length", "")
        is_valid = text.isascii() and text.isdigit() and len(text) < 20 and "Transfer-Encoding" not in self.headers
        if is_valid and int(text) <= _LARGEST_BODY:
            return int(text)
        return None

    def _discard_body(self) -> None:
        """Read over the body of a rejected request, so that the next request of the connection begins after it."""
        has_body = self.command == "POST" or "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        length = self._length if has_body else 0
        if length is None:
            self.close_connection = True
        for _ in self._parts(length or 0):
            pass

    def _parts(self, length: int) -> Iterator[bytes]:
        """Read the body in parts.

        Raises:
            TimeoutError: it does not arrive in time; the server then closes the connection.
        """
        end = time.monotonic() + _BODY_SECONDS
        while length:
            part = self.rfile.read1(min(length, 65536))
            if not part or time.monotonic() > end:
                raise TimeoutError("the body of the request did not arrive")
            length -= len(part)
            yield part

    def _refuse(self, status: int, message: str, code: str = "invalid_request") -> None:
        self._send(status, {"error": {"message": message, "type": "invalid_request_error", "code": code}})

    def _send(self, status: int, content: Body) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if self.close_connection:
            self.send_header("Connection", "close")
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


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Return whether a JSON value has more levels of lists and objects, without recursion."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [each for each in layer if isinstance(each, list | dict)]
        layer = [part for each in containers for part in (each.values() if isinstance(each, dict) else each)]
        if not containers:
            return False
    return True
