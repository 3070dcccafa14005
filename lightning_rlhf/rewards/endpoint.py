"""Asking a server many questions: at a pace, with patience, within a budget."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lightning_rlhf.rewards.conventions import EndsTheRun

_MAX_WAIT_S = 30.0  # between two tries; also the most that a server's Retry-After is believed


class BudgetSpent(EndsTheRun):
    """The requests or tokens that a run may use are used."""


class Busy(RuntimeError):
    """All tries were answered with status 429: come again."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and how much may be asked of it.

    Args:
        url: of the route, for example ``http://127.0.0.1:8000/v1/chat/completions``.
        key_env: environment variable that holds the key, sent as a bearer token; None sends none. The key itself is in
            no configuration and in no message.
        timeout_s: for one try, seconds.
        tries: how often a request is sent until it is answered, at least 1. Sent again is what met no server, a
            timeout, status 429 or 5xx, or an answer that is no JSON; after a pause that doubles up to 30 s, with
            jitter, or after the server's Retry-After.
        concurrency: requests under way at the same time.
        requests_per_minute: pace, tries included; None is no limit.
        tokens_per_minute: pace by estimate, four characters a token and the longest answer; None is no limit.
        max_requests: of the whole run in each process, tries included; then the run ends with a sentence.
        max_tokens: likewise, as the server counts them, by estimate where it does not; a refusal counts none.
    """

    url: str
    key_env: str | None = None
    timeout_s: float = 60.0
    tries: int = 5
    concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("url holds a name or password, and would be shown in messages: give a key by key_env")
        for name, value in vars(self).items():
            if name not in ("url", "key_env") and value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.key_env is not None:
            key_in(self.key_env)
        missing = [name for name in ("httpx", "tenacity") if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(
                f"a reward from a server needs {' and '.join(missing)}: pip install 'lightning-rlhf[judge]'"
            )


@dataclass(frozen=True)
class Question:
    """One request.

    Args:
        body: JSON.
        tokens: that it may take, question and answer, by estimate.
    """

    body: dict[str, Any]
    tokens: int


class Client:
    """Asks an endpoint, from any thread; pace and budget are those of all its callers together.

    Requests run in an event loop of a thread of their own, which starts with the first question.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.requests = self.tokens = 0
        self._key = key_in(endpoint.key_env) if endpoint.key_env else "\0"
        self._lock = threading.Lock()
        self._next = {"requests": 0.0, "tokens": 0.0}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, question: Question) -> Any:
        """What the server answers, as parsed JSON. It may be awaited in any event loop.

        Raises:
            BudgetSpent: before the first request that would exceed the budget.
            RuntimeError: no answer after all tries, or the server refuses such requests (a status 4xx but 429).
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(question), self._running_loop()))

    async def _ask(self, question: Question) -> Any:
        import httpx
        import tenacity

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.endpoint.tries),
            wait=_pause,
            retry=tenacity.retry_if_exception(_is_passing),
            reraise=True,
        )
        try:
            async with self._places:
                return await retrying(self._try, question)
        except httpx.HTTPStatusError as error:
            said = f"{error.response.status_code} {error.response.text[:200]!r}".replace(self._key, "***")
            tries = f" {self.endpoint.tries} times" if _is_passing(error) else ""
            kind = Busy if error.response.status_code == 429 else RuntimeError
            raise kind(f"{self.endpoint.url} answered{tries}: {said}") from None
        except (httpx.TransportError, ValueError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise RuntimeError(f"{self.endpoint.url} gave no answer in {self.endpoint.tries} tries: {reason}") from None

    async def _try(self, question: Question) -> Any:
        self._spend(question)
        await asyncio.sleep(self._turn(question.tokens))
        response = await self._client.post(self.endpoint.url, json=question.body)
        if response.is_error:
            self._count(-question.tokens)  # a server that refuses has read and written none
        response.raise_for_status()
        found = response.json()
        usage = found.get("usage") if isinstance(found, dict) else None
        used = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(used, int):
            self._count(used - question.tokens)
        return found

    def _count(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens

    def _spend(self, question: Question) -> None:
        """Count a request before it is sent, so that those under way together cannot exceed the budget."""
        with self._lock:
            for name, used, more, limit in (
                ("requests", self.requests, 1, self.endpoint.max_requests),
                ("tokens", self.tokens, question.tokens, self.endpoint.max_tokens),
            ):
                if limit is not None and used + more > limit:
                    raise BudgetSpent(
                        f"{self.endpoint.url}: the budget of {limit} {name} (max_{name}) is spent: {used} are used and "
                        f"the next request may take {more}; raise it, or ask less often"
                    )
            self.requests += 1
            self.tokens += question.tokens

    def _turn(self, tokens: int) -> float:
        """Seconds until a request may be sent: each takes its share of a minute, and none is sent before its turn."""
        with self._lock:
            now = time.monotonic()
            start = max(now, *self._next.values())
            for name, share, pace in (
                ("requests", 1, self.endpoint.requests_per_minute),
                ("tokens", tokens, self.endpoint.tokens_per_minute),
            ):
                if pace is not None:
                    self._next[name] = start + 60.0 * share / pace
            return start - now

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        import httpx

        with self._lock:
            if self._loop is None:
                headers = {"Authorization": f"Bearer {self._key}"} if self.endpoint.key_env else {}
                self._places = asyncio.Semaphore(self.endpoint.concurrency)
                self._client = httpx.AsyncClient(headers=headers, timeout=self.endpoint.timeout_s, trust_env=False)
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(self._loop,), name="reward endpoint", daemon=True)
                thread.start()
                self._finalizer = weakref.finalize(self, _end, self._client, self._loop, thread)
            return self._loop

    def close(self) -> None:
        """End connections and thread; another question starts new ones."""
        with self._lock:
            running, self._loop = self._loop, None
        if running is not None:
            self._finalizer()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(client: Any, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def close() -> None:
        asking = asyncio.all_tasks() - {asyncio.current_task()}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await client.aclose()

    asyncio.run_coroutine_threadsafe(close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def key_in(name: str) -> str:
    """The key in an environment variable; spaces around it, as a file's last line has, are no part of it.

    Raises:
        ValueError: there is none, or what no header can hold; it is not shown.
    """
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"the environment variable {name!r} (key_env) is not set: it must hold the key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"the environment variable {name!r} (key_env) holds no key: a key is ASCII, without spaces")
    return key


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may be answered later; an answer that is no JSON may be, too."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, (httpx.TransportError, ValueError))


def _pause(state: Any) -> float:
    """Seconds before the next try."""
    import httpx
    import tenacity

    error = state.outcome.exception()
    if isinstance(error, httpx.HTTPStatusError):
        wanted = error.response.headers.get("Retry-After", "")
        if wanted.isdecimal():
            return min(float(wanted), _MAX_WAIT_S)
    return float(tenacity.wait_random_exponential(multiplier=0.5, max=_MAX_WAIT_S)(state))
