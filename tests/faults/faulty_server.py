"""Middleware of a vLLM server whose responses are sometimes wrong, late or missing."""

import asyncio
import fcntl
import json
import os
import random
from pathlib import Path

from starlette.responses import JSONResponse, Response

_KINDS = ("tokens", "error", "nonsense", "slow", "tokens", "nonsense", "hang", "nonsense", "slow", "error")
_APART = 12  # requests between two faults, so that no request fails three times
_PUSH = ("/update_weights", "/finish_weight_update", "/weight_info")


class Faults:
    """Answers with faults, which the file $FAULTS lists after a first line with their largest number.

    Args:
        app: application of the server.
    """

    def __init__(self, app):
        self._app = app
        self._draw = random.Random(os.getpid())
        self._since = 0

    async def __call__(self, scope, receive, send):
        """Pass a request to the server, or answer it with a fault."""
        path = scope.get("path", "")
        kind = self._next(path in _PUSH) if path.endswith("/generate") or path in _PUSH else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        if kind == "error":
            await JSONResponse({"error": {"message": "out of cheese"}}, 500)(scope, receive, send)
        elif kind == "nonsense":
            content = self._draw.choice([b"<html>", b"[]", b"3", b'{"choices": [{}]}'])
            await Response(content, media_type="application/json")(scope, receive, send)
        elif kind == "tokens":
            await self._app(scope, receive, _Changed(send))
        else:
            await asyncio.sleep(2 if kind == "slow" else 3600)
            await self._app(scope, receive, send)

    def _next(self, of_push):
        """Return the fault of this request, which is added to the file, or None.

        Args:
            of_push: whether the request belongs to a push, which has fewer kinds of faults.
        """
        self._since += 1
        if self._since < _APART or self._draw.random() > 0.2:
            return None
        with Path(os.environ["FAULTS"]).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            most, *faults = file.read().split()
            if len(faults) >= int(most):
                return None
            kind = _KINDS[len(faults) % len(_KINDS)]
            if of_push and kind in ("tokens", "hang"):
                return None
            file.write(f"{kind}\n")
        self._since = 0
        return kind


class _Changed:
    """Sends a response of the server with tokens that the model does not have.

    Args:
        send: function that sends a part of the response.
    """

    def __init__(self, send):
        self._send, self._start, self._body = send, None, b""

    async def __call__(self, message):
        """Keep the parts of the response, and send it changed after the last one."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        response = json.loads(self._body)
        for choice in response.get("choices", []):
            choice["token_ids"] = [10**6 + token for token in choice["token_ids"]]
        body = json.dumps(response).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
