"""Who answers prompts for ``generate``: what is asked of them, and servers; engines are in ``engine_answering``."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lightning_rlhf.data.chat import messages_of
from lightning_rlhf.data.columns import Columns
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, use_rows
from lightning_rlhf.data.text_messages import TextMessages
from lightning_rlhf.types import SamplingParams

if TYPE_CHECKING:
    from lightning_rlhf.rewards.endpoint import Client, Request

_SERVER_SECONDS = 3600.0  # for one answer, and for a server that is up but busy
_TRIES = 8
_SEEDS = 1 << 31  # what every server takes
_HINTS = {
    401: "; put its key into a variable and name it with --api-key-env",
    404: "; is it a server with OpenAI's API?",
    503: "; it may still be loading its model",
}


class Prompt(NamedTuple):
    """A prompt and the row it came in.

    Args:
        row: as plain values.
        text: of the prompt, after the chat template if this machine applies it; empty where a server does.
        ids: of its tokens; empty where a server makes them.
        messages: it was made of, if any.
    """

    row: dict[str, Any]
    text: str
    ids: list[int]
    messages: list[dict[str, Any]]


class Answer(NamedTuple):
    """A response.

    Args:
        text: without special tokens.
        tokens: how many it has, the stop token included; None if a server does not tell.
        finish_reason: ``stop`` or ``length``.
    """

    text: str
    tokens: int | None
    finish_reason: str


class Answerer(Protocol):
    """Whoever answers."""

    def identity(self) -> dict[str, Any]:
        """What decides about its answers, as plain values."""

    def prompts(
        self, source: str, columns: dict[str, str], on_bad_row: OnBadRow, as_messages: bool = False
    ) -> list[Prompt]:
        """Read the prompts of a source.

        Args:
            source: a file, a hub id, or what else data modules read.
            columns: our names to the data's.
            on_bad_row: ``error`` or ``skip``.
            as_messages: make a user's message of each prompt that is text.

        Raises:
            ValueError: rows that cannot be used.
        """

    def start(self, longest: int, log: Path) -> str:
        """Get ready; says in a few words who answers.

        Args:
            longest: prompt, in tokens.
            log: file for output of its own.
        """

    def answer(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Answer]:
        """One answer for each prompt, each drawn from a seed of its own."""

    def close(self) -> None:
        """End whatever was started."""


class ServerAnswerer:
    """A server that speaks OpenAI's API; text is completed, messages are answered by its chat template.

    Args:
        url: for example ``http://127.0.0.1:8000``.
        key_env: environment variable with the key; None sends none.
        model: its name at the server; None takes the only one there.
        sampling: how to draw.
        concurrency: requests under way at a time.
    """

    def __init__(
        self, url: str, key_env: str | None, model: str | None, sampling: SamplingParams, concurrency: int
    ) -> None:
        missing = [name for name in ("httpx", "tenacity") if importlib.util.find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(
                f"--server needs {' and '.join(missing)}, which is not installed: pip install 'lightning-rlhf[judge]'"
            )
        self._url, self._key_env, self._sampling, self._concurrency = url.rstrip("/"), key_env, sampling, concurrency
        self._url = self._url.removesuffix("/v1")
        self._clients: dict[str, Client] = {route: self._client(route) for route in ("completions", "chat/completions")}
        self._model = model or self._only_model()

    def _client(self, route: str) -> Client:
        from lightning_rlhf.rewards.endpoint import Client, Endpoint

        url = f"{self._url}/v1/{route}"
        return Client(Endpoint(url, self._key_env, _SERVER_SECONDS, _TRIES, self._concurrency))

    def _only_model(self) -> str:
        import httpx

        from lightning_rlhf.rewards.endpoint import read_key

        headers = {"Authorization": f"Bearer {read_key(self._key_env)}"} if self._key_env else {}
        try:
            response = httpx.get(f"{self._url}/v1/models", headers=headers, timeout=30, trust_env=False)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ValueError(
                f"no server answers at {self._url} ({error}): start it, or give another --server"
            ) from error
        if response.status_code != 200:
            raise ValueError(
                f"{self._url}/v1/models answered {response.status_code}{_HINTS.get(response.status_code, '')}"
            )
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._url}/v1/models lists no models: is it a server with OpenAI's API?") from error
        if len(names) != 1:
            raise ValueError(f"{self._url} serves {', '.join(names) or 'no model'}: say which by --model")
        return names[0]

    def identity(self) -> dict[str, Any]:
        """See :class:`Answerer`; where the server is does not matter."""
        return {"model": self._model, "engine": "server"}

    def prompts(
        self, source: str, columns: dict[str, str], on_bad_row: OnBadRow, as_messages: bool = False
    ) -> list[Prompt]:
        """See :class:`Answerer`."""
        found = Columns(columns, PromptDataModule.field_candidates)

        def convert(row: Row) -> Prompt:
            fields = found.find(row)
            name = "messages" if "messages" in fields else "prompt"
            value = TextMessages()(name, fields[name]) if as_messages else fields[name]
            if isinstance(value, str):
                return Prompt(plain(row), fields.text(name), [], [])
            messages = messages_of(value, "prompt")
            if lost := [name for name in ("tools", "chat_template_kwargs") if row.get(name)]:
                raise BadRow(f"a server is not sent {lost[0]!r}, which its chat template would need: take --model")
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            return Prompt(plain(row), "", [], messages)

        prompts, report = use_rows(source, "prompts", convert, on_bad_row)
        print(report)
        return prompts

    def start(self, longest: int, log: Path) -> str:
        """See :class:`Answerer`."""
        return f"{self._model} at {self._url}"

    def answer(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Answer]:
        """See :class:`Answerer`."""

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*map(self._ask, prompts, seeds))

        return asyncio.run(all_of_them())

    async def _ask(self, prompt: Prompt, seed: int) -> Answer:
        from lightning_rlhf.rewards.endpoint import Request

        route = "chat/completions" if prompt.messages else "completions"
        given = {"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}
        drawn = self._sampling
        body = {
            "model": self._model, **given, "seed": seed % _SEEDS, "max_tokens": drawn.max_tokens,
            "temperature": drawn.temperature, "top_p": drawn.top_p,
        }  # fmt: skip
        if drawn.top_k:  # not every server knows it
            body["top_k"] = drawn.top_k
        answer = await self._patiently(self._clients[route], Request(body, 1))
        try:
            choice, used = answer["choices"][0], answer.get("usage") or {}
            text = choice["message"]["content"] if prompt.messages else choice["text"]
            return Answer(text or "", used.get("completion_tokens"), choice["finish_reason"])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise RuntimeError(f"{self._url}/v1/{route} answered what is no completion: {str(answer)[:200]}") from error

    async def _patiently(self, client: Client, request: Request) -> Any:
        from lightning_rlhf.rewards.endpoint import ServerBusy

        until = time.monotonic() + _SERVER_SECONDS
        while True:
            try:
                return await client.post(request)
            except ServerBusy:  # others ask it too; what stands behind their requests takes longer than a few tries
                if time.monotonic() > until:
                    raise

    def close(self) -> None:
        """See :class:`Answerer`."""
        for client in self._clients.values():
            client.close()


def plain(row: Row) -> dict[str, Any]:
    """A row as it is written beside its responses.

    Raises:
        BadRow: it holds something that JSON has no words for.
    """
    try:
        written = json.dumps(dict(row), ensure_ascii=False)
        written.encode()  # halves of letters are no text
        found: dict[str, Any] = json.loads(written)
    except (TypeError, ValueError) as error:
        raise BadRow(f"cannot be written as JSON: {error}", "cannot be written as JSON") from error
    return found


def digest(prompts: Sequence[Prompt]) -> str:
    """What tells prompts from others: by what is answered, and by the rows that are written beside the answers."""
    total = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        total.update(json.dumps(prompt).encode() + b"\n")
    return total.hexdigest()
