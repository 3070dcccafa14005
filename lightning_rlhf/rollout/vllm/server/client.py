"""HTTP client of a vLLM server."""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError

log = logging.getLogger(__name__)
_GET_SECONDS = 30
_HEARTBEAT_SECONDS = 60
_HOW_TO_START = "the page Engines of the documentation has the command that starts one"


class RejectedKey(UsageError):
    """The server rejected the API key, or that there was none."""


class VLLMServer:
    """Client of a vLLM server.

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
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._timeout = timeout
        self._key = key
        # Ignore proxies in the environment.
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    @property
    def is_local(self) -> bool:
        """Whether the server's address is a loopback address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def wait_until_up(self) -> None:
        """Wait until the server responds; log a line every minute.

        Raises:
            EngineDied: the server did not respond in time.
        """
        began = time.monotonic()
        last_logged = began
        while True:
            try:
                return self.get("/health")
            except EngineDied as error:
                now = time.monotonic()
                if now - began > self._timeout:
                    raise EngineDied(f"{error}; {_HOW_TO_START}") from error
                if now - last_logged > _HEARTBEAT_SECONDS:
                    last_logged = now
                    log.info("Waiting for the vLLM server at %s for %.0f s.", self.url, now - began)
            time.sleep(min(1.0, self._timeout))

    def get(self, path: str, with_key: bool = True, **query: str) -> Any:
        """Send a GET request and return the decoded response; raises as :meth:`post`."""
        return self._send(self._request(path, query, None, with_key), _GET_SECONDS)

    def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        """Send a POST request and return the decoded response.

        Raises:
            RejectedKey: the server rejects the key.
            ValueError: the server does not have the route.
            RuntimeError: the server rejects the request.
            EngineDied: the server cannot be reached, or failed.
        """
        return self._send(self._request(path, query, json.dumps(body or {}).encode(), True), self._timeout)

    def _request(self, path: str, query: dict[str, str], data: bytes | None, with_key: bool) -> Request:
        headers = {"Content-Type": "application/json"}
        if self._key and with_key:
            headers["Authorization"] = f"Bearer {self._key}"
        query_string = f"?{urlencode(query)}" if query else ""
        return Request(f"{self.url}{path}{query_string}", data, headers)

    def _send(self, request: Request, seconds: float) -> Any:
        try:
            with self._opener.open(request, timeout=seconds) as response:
                body = response.read()
                if body:
                    return json.loads(body)
                return None
        except HTTPError as error:
            with error:
                raise self._error(request.selector, error.code, error.read().decode(errors="replace")) from error
        except TimeoutError as error:
            raise self._unreachable(f"no response for {seconds:g} s") from error
        except (OSError, HTTPException) as error:
            raise self._unreachable(getattr(error, "reason", error)) from error

    def _unreachable(self, reason: object) -> EngineDied:
        return EngineDied(f"the vLLM server at {self.url} cannot be reached ({reason})")

    def _error(self, path: str, status: int, body: str) -> Exception:
        message = _message(body)
        if status == 401:
            return RejectedKey(f"the vLLM server at {self.url} rejected the API key")
        if status in (403, 404, 405):
            return UsageError(
                f"the vLLM server at {self.url} does not have the route {path} ({message}): {_HOW_TO_START}"
            )
        if status < 500:
            return RunError(f"the vLLM server at {self.url} rejected the request: {message}")
        return EngineDied(f"the vLLM server at {self.url} failed at {path}: {message}; see the server's log")


def _message(body: str) -> str:
    """Return the message of an error response, at most 500 characters."""
    try:
        content = json.loads(body)
    except ValueError:
        return body[:500]
    if isinstance(content, dict):
        content = content.get("error", content)
    return str(content.get("message", content) if isinstance(content, dict) else content)[:500]
