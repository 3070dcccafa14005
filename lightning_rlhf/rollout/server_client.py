"""HTTP to a vLLM server, with every way it can fail put into words."""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from lightning_rlhf.rollout.arrivals import as_they_come
from lightning_rlhf.rollout.engine import EngineDied

log = logging.getLogger(__name__)
_CONNECTIONS = 256  # requests that one rank has open at a time
_ASK_SECONDS = 30  # for an answer that takes no work
_SAY_SECONDS = 60
_HOW_TO_START = "docs/rollouts.md has the command that starts one"


class VLLMServer:
    """A vLLM server as this process reaches it.

    Args:
        url: ``http://host:port``.
        key: that it asks for; None if it asks for none.
        patience: longest wait for it to come up, and for one answer, in seconds.

    Raises:
        ValueError: the url is none.
    """

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"the url of a vLLM server looks like http://127.0.0.1:8000, got {url!r}")
        self.url, self.host, self._patience = url.rstrip("/"), parts.hostname, patience
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._key = key
        # A proxy of the environment is for the world outside.
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    @property
    def is_local(self) -> bool:
        """Whether it can be reached from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def wait_until_up(self) -> None:
        """Wait until it answers, and say so every minute.

        Raises:
            EngineDied: it did not come up.
        """
        began = said = time.monotonic()
        while True:
            try:
                return self.get("/health")
            except EngineDied as error:
                now = time.monotonic()
                if now - began > self._patience:
                    raise EngineDied(f"{error}; {_HOW_TO_START}") from error
                if now - said > _SAY_SECONDS:
                    said = now
                    log.info("Waiting for the vLLM server at %s for %.0f s.", self.url, now - began)
            time.sleep(min(1.0, self._patience))

    def get(self, path: str, keyless: bool = False, **query: str) -> Any:
        """Ask for something; see :meth:`post` for the faults."""
        return self._answer(self._request(path, query, None, keyless), _ASK_SECONDS)

    def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        """Have it do something.

        Raises:
            ValueError: it does not offer that, or refuses the key.
            RuntimeError: it refuses the request.
            EngineDied: it cannot be reached, or failed.
        """
        return self._answer(self._request(path, query, json.dumps(body or {}).encode(), False), self._patience)

    def post_all(self, path: str, bodies: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
        """The answers to many requests with their numbers, as they come; says every minute how many are missing."""
        began, pool = time.monotonic(), ThreadPoolExecutor(_CONNECTIONS)
        try:
            numbers = {pool.submit(self.post, path, body): number for number, body in enumerate(bodies)}
            for future in as_they_come(numbers, _SAY_SECONDS):
                if future is not None:
                    yield numbers.pop(future), future.result()
                    continue
                seconds = time.monotonic() - began
                log.info("Waiting for %d of %d answers of %s for %.0f s.", len(numbers), len(bodies), self.url, seconds)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, path: str, query: dict[str, str], data: bytes | None, keyless: bool) -> Request:
        headers = {"Content-Type": "application/json"}
        if self._key and not keyless:
            headers["Authorization"] = f"Bearer {self._key}"
        question = f"?{urlencode(query)}" if query else ""
        return Request(f"{self.url}{path}{question}", data, headers)

    def _answer(self, request: Request, seconds: float) -> Any:
        try:
            with self._opener.open(request, timeout=seconds) as response:
                body = response.read()
                return json.loads(body) if body else None
        except HTTPError as error:
            with error:
                raise self._refusal(request.selector, error.code, error.read().decode(errors="replace")) from error
        except (OSError, HTTPException) as error:
            told = (
                f"no answer for {seconds:g} s" if isinstance(error, TimeoutError) else getattr(error, "reason", error)
            )
            raise EngineDied(f"the vLLM server at {self.url} cannot be reached ({told})") from error

    def _refusal(self, path: str, code: int, body: str) -> Exception:
        told = _message(body)
        if code == 401:
            return ValueError(f"the vLLM server at {self.url} wants another API key")
        if code in (403, 404, 405):
            return ValueError(f"the vLLM server at {self.url} does not offer {path} ({told}): {_HOW_TO_START}")
        if code < 500:
            return RuntimeError(f"the vLLM server at {self.url} refused the request: {told}")
        return EngineDied(f"the vLLM server at {self.url} failed at {path}: {told}; its own output says more")


def _message(body: str) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        return body[:500]
    found = found.get("error", found) if isinstance(found, dict) else found
    return str(found.get("message", found) if isinstance(found, dict) else found)[:500]
