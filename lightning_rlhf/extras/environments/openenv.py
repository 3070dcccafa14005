"""Environments of OpenEnv servers, over the websocket protocol of openenv 0.10."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_rlhf.environments.protocol import Environment, Reply
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_SEEDS = 2**31  # environments pass them on to numpy, gymnasium and others
_LARGEST_MESSAGE = 100 * 2**20  # bytes, as in OpenEnv's client


class OpenEnv(Environment):
    """Plays an environment on a running OpenEnv server. Every conversation gets its own connection and session there.

    The server must allow one session for each conversation of a rollout (``max_concurrent_envs``). You name the server
    in the configuration. Rows of the data cannot.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        action: field of the action that takes the text of a turn.
        observation: field of the observation that becomes the message. A value that is not a text becomes JSON.
    """

    def __init__(self, url: str, action: str, observation: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UsageError(f"url of OpenEnv must begin with http://, https://, ws:// or wss://, got {url!r}")
        self._url = url
        self._address = f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        self._proxy = None if parts.hostname in ("localhost", "127.0.0.1", "::1") else True
        self._action = action
        self._observation = observation
        self._connection: Any = None

    async def reset(self, seed: int) -> Reply:
        """Open a session and start an episode; its first observation is appended to the prompt."""
        connect = _websockets().connect
        try:
            self._connection = await connect(self._address, max_size=_LARGEST_MESSAGE, proxy=self._proxy)
        except Exception as error:  # of the system, of the handshake, of a proxy
            raise RunError(f"the OpenEnv server {self._url} cannot be reached: {error}") from error
        return await self._request("reset", {"seed": seed % _SEEDS})

    async def step(self, text: str) -> Reply:
        """Take a step."""
        return await self._request("step", {self._action: text})

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Reply:
        closed = _websockets().ConnectionClosed
        try:
            with contextlib.suppress(closed):  # a server that rejects a session sends its reason before it closes
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            response = json.loads(await self._connection.recv())
        except closed as error:
            raise RunError(f"the OpenEnv server {self._url} closed the connection: {error}") from error
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise RunError(f"the OpenEnv server {self._url} sent a message that is not JSON: {error}") from error
        return self._reply(kind, response)

    def _reply(self, kind: str, response: Any) -> Reply:
        """Convert a response of the server."""
        content = response if isinstance(response, dict) else {}
        data = content["data"] if isinstance(content.get("data"), dict) else {}
        if content.get("type") == "error":
            details = ""
            if data.get("errors"):
                details = f": {json.dumps(data['errors'])}"[:1000]
            reason = f"{str(data.get('message'))[:1000]} ({str(data.get('code'))[:100]}){details}"
            raise RunError(f"the OpenEnv server {self._url} rejected {kind!r}: {reason}")
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, dict) or self._observation not in observation:
            shown = json.dumps(response, ensure_ascii=False)[:200]
            raise RunError(
                f"the OpenEnv server {self._url} replied to {kind!r} without the field {self._observation!r} of an "
                f"observation: {shown}"
            )
        value = observation[self._observation]
        if isinstance(value, str):
            message = value
        elif value is None:
            message = ""
        else:
            message = json.dumps(value, ensure_ascii=False)
        if reward is None or isinstance(reward, bool):
            reward = float(reward or 0)
        return Reply(message, reward, data.get("done", False))

    async def close(self) -> None:
        """Close the session."""
        if self._connection is not None:
            with contextlib.suppress(_websockets().ConnectionClosed):
                await self._connection.send(json.dumps({"type": "close"}))
            await self._connection.close()


def _websockets() -> Any:
    try:
        import websockets
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "OpenEnv needs the package websockets: run pip install 'lightning-rlhf[openenv]'"
        ) from error
    return websockets
