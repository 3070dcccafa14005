"""HTTP client of a vLLM server."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from threading import Lock
from typing import Any
from urllib.parse import urlencode, urlsplit

from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError

_GET_SECONDS = 30.0
_PART_BYTES, _MAX_BYTES = 1 << 16, 1 << 30  # of a response
_CONNECT_SECONDS = 30.0
HOW_TO_START = "the page Engines of the documentation has the command that starts one"


class RejectedKey(UsageError):
    """The server rejected the API key, or that there was none."""


class VLLMServer:
    """Client of a vLLM server, for any number of threads. Each request has a separate connection, without a proxy.

    Args:
        url: address, ``http://host:port``.
        key: API key of the server; None for a server without a key.
        timeout: longest wait for the server to start, and for one response, in seconds.

    Raises:
        ValueError: the url is invalid.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"the url of a vLLM server looks like http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"the url of a vLLM server looks like http://127.0.0.1:8000, got {url!r}") from error
        self._timeout = timeout
        self._key = key
        self._connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._lock = Lock()
        self._waiting = set[socket.socket]()  # of requests without a response
        self._aborts = 0  # number of calls of abort()

    @property
    def is_local(self) -> bool:
        """Whether the server's address is a loopback address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def get(self, path: str, with_key: bool = True, seconds: float = _GET_SECONDS, **query: str) -> Any:
        """Send a GET request and return the decoded response; raises as :meth:`post`.

        Args:
            path: route.
            with_key: whether to send the key.
            seconds: longest wait for the response.
            query: parameters of the URL.
        """
        return self._send("GET", _with_query(path, query), None, self._key if with_key else None, seconds)

    def post(self, path: str, body: Any = None, seconds: float | None = None, **query: str) -> Any:
        """Send a POST request and return the decoded response.

        Args:
            path: route.
            body: content of the request, which becomes JSON; None for no fields.
            seconds: longest wait for the response; None is the timeout of the constructor.
            query: parameters of the URL.

        Raises:
            RejectedKey: the server rejects the key.
            ValueError: the server does not have the route.
            RuntimeError: the server rejects the request.
            EngineDied: the server cannot be reached, or failed.
        """
        content = json.dumps(body or {}).encode()
        return self._send("POST", _with_query(path, query), content, self._key, seconds or self._timeout)

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Limit the waits for responses, while no other thread sends requests with the default limit."""
        longest, self._timeout = self._timeout, min(self._timeout, seconds)
        try:
            yield
        finally:
            self._timeout = longest

    def abort(self) -> None:
        """End all requests that have no response yet; they raise :class:`EngineDied`."""
        with self._lock:
            self._aborts += 1
            for waiting in self._waiting:
                with suppress(OSError):
                    waiting.shutdown(socket.SHUT_RDWR)

    def _send(self, method: str, path: str, content: bytes | None, key: str | None, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = self._connection_class(self.host, self.port, timeout=min(_CONNECT_SECONDS, seconds))
        aborts = self._aborts
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            with closing(connection), self._can_be_aborted(connection.sock, aborts):
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                body = _whole_body(response, time.monotonic() + seconds)
        except TimeoutError as error:
            raise self._unreachable(f"no response for {seconds:g} s") from error
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        if response.status >= 300:
            raise self._error(path, response.status, body.decode(errors="replace"))
        try:
            return json.loads(body) if body else None
        except (ValueError, RecursionError) as error:  # the latter of deeply nested brackets
            raise self._unreachable(f"its response is not JSON: {error}") from error

    @contextmanager
    def _can_be_aborted(self, sent_by: socket.socket, aborts: int) -> Iterator[None]:
        with self._lock:
            if self._aborts > aborts:
                raise ConnectionAbortedError("it was aborted while it connected")
            self._waiting.add(sent_by)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(sent_by)

    def _unreachable(self, reason: object) -> EngineDied:
        return EngineDied(f"the vLLM server at {self.url} cannot be reached ({reason})")

    def _error(self, path: str, status: int, body: str) -> Exception:
        message = _message(body)
        if status == 401:
            return RejectedKey(f"the vLLM server at {self.url} rejected the API key")
        if status in (403, 404, 405):
            return UsageError(
                f"the vLLM server at {self.url} does not have the route {path} ({message}): {HOW_TO_START}"
            )
        if status < 500:
            return RunError(f"the vLLM server at {self.url} rejected the request: {message}")
        return EngineDied(f"the vLLM server at {self.url} failed at {path}: {message}; see the server's log")


def _whole_body(response: HTTPResponse, deadline: float) -> bytes:
    """Read a response.

    Args:
        response: response whose head has been read; a wait for a part of it has the limit of its socket.
        deadline: end of the time for all parts, as of ``time.monotonic``.

    Raises:
        TimeoutError: the parts come too slowly.
        OSError: it is too long.
    """
    body = bytearray()
    while part := response.read1(_PART_BYTES):
        body += part
        if len(body) > _MAX_BYTES:
            raise OSError(f"a response of more than {_MAX_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:  # read1 does not tell the end of a response from a closed connection
        raise IncompleteRead(bytes(body), response.length)
    return bytes(body)


def _with_query(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _message(body: str) -> str:
    """Return the message of an error response, at most 500 characters."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body[:500]
    if isinstance(content, dict):
        content = content.get("error", content)
    return str(content.get("message", content) if isinstance(content, dict) else content)[:500]
