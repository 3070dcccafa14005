"""HTTP client for reward servers, with rate limits, retries and a budget."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from lightning_rlhf.calls.loop import EventLoopThread, cancel_other_tasks
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError
from lightning_rlhf.extras.servers.balance import Balancer
from lightning_rlhf.rewards.results import AbortRun

_MAX_WAIT_S = 30.0  # longest pause between two tries; also limits Retry-After
_LEFT_OUT_S = 30.0  # in which a server gets no requests after a failed one, if there is another
_MAX_BYTES = 1 << 28  # of a reply
_MAX_REPLY = 200  # characters of a reply that messages show
_SECRET = re.compile(r"(?i)((x|api|access|auth)[-_]?)*(key|token|secret|password|sig|signature)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BASE64 = re.compile(r"(;base64,)[A-Za-z0-9+/=\\]+")  # of a data: URL, whose slashes JSON may escape
_PIXELS_PER_TOKEN = 28 * 28  # as in Qwen2.5-VL


class BudgetSpent(AbortRun):
    """The budget of requests or tokens is spent."""


class ServerBusy(RunError):
    """The last try was answered with status 429, too many requests."""


class UnreadableReply(UsageError):
    """Error for a reply that is too long, or not JSON."""


@dataclass(frozen=True)
class Endpoint:
    """A server and the limits of requests to it, or several servers with the same model.

    With several servers, a request goes to the one with the fewest unfinished requests. One where a request failed gets
    none for 30 s, if there is another.

    Args:
        url: URL of the route, for example ``http://127.0.0.1:8000/v1/chat/completions``, or a list of them.
        key_env: name of the environment variable with the key, sent as a bearer token; None sends no key. The key
            itself appears neither in configurations nor in messages.
        timeout_s: time limit of one try, from the connection to the whole reply, seconds.
        tries: largest number of times that a request is sent, at least 1. It is sent again after a connection error, a
            timeout, status 429 or 5xx, or a reply that is not JSON. The pause is the server's Retry-After, or grows
            exponentially with jitter, and is at most 30 s.
        concurrency: largest number of concurrent requests, for each server; others also get those of one that fails.
        requests_per_minute: rate limit of requests, including retries; None: no limit.
        tokens_per_minute: rate limit of tokens, estimated as one per four characters of the request, one per 784 pixels
            of its images, and the longest answer; None: no limit.
        max_requests: largest number of requests of each process, including retries; the run ends before it is exceeded.
        max_tokens: largest number of tokens of each process, as counted by the server, else estimated; the run ends
            before it is exceeded. Rejected requests count 0.
        max_seconds: longest time in which each process waits for replies, seconds, in which any number of requests may
            be unfinished; the run ends with the first request after it.
    """

    url: str | list[str]
    key_env: str | None = None
    timeout_s: float = 60.0
    tries: int = 5
    concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.url:
            raise UsageError("url must have at least one address, got none")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"url must begin with http:// or https://, got {url!r}")
            if "@" in urlsplit(url).netloc:
                raise UsageError(
                    "url must not contain a user name or password, because messages show the URL: use key_env"
                )
            if secret := [name for name, _ in parse_qsl(urlsplit(url).query) if _SECRET.fullmatch(name)]:
                raise UsageError(
                    f"url must not contain a key ({secret[0]}=...), because messages and reports show the URL: use "
                    f"key_env"
                )
        for name, value in vars(self).items():
            if name not in ("url", "key_env") and value is not None and not value > 0:
                raise UsageError(f"{name} must be positive, got {value}")
        if self.key_env is not None:
            read_key(self.key_env)
        missing = [name for name in ("httpx", "tenacity") if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingPackageError(
                f"a request to a server needs {' and '.join(missing)}: pip install 'lightning-rlhf[judge]'"
            )

    @property
    def urls(self) -> list[str]:
        """URLs of all servers."""
        return [self.url] if isinstance(self.url, str) else list(self.url)

    def __str__(self) -> str:
        return ", ".join(self.urls)


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        body: JSON object; None gets the URL.
        tokens: estimated number of tokens of request and reply.
        text: token ids of the text in the request; requests whose texts begin equally go to one server.
    """

    body: dict[str, Any] | None
    tokens: int
    text: Sequence[int] = ()


def estimated_tokens(text: str, images: Sequence[EncodedImage] = ()) -> int:
    """Return the number of tokens of a text and its images, estimated as :class:`Endpoint` describes."""
    return len(text) // 4 + sum(image.width * image.height // _PIXELS_PER_TOKEN + 1 for image in images)


def start_of_reply(reply: Any) -> str:
    """Return the first characters of a reply for a message, without the content of images that it repeats."""
    return _BASE64.sub(r"\1...", str(reply))[:_MAX_REPLY]


class Client:
    """Sends requests to an endpoint from any thread; all callers share its limits and budget.

    Requests run in an event loop in a separate thread, which starts with the first request.

    Args:
        endpoint: server and request limits.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.requests = self.tokens = 0
        self._waits = _Stopwatch()
        self._balancer = Balancer(endpoint.urls)
        self._key = None if endpoint.key_env is None else read_key(endpoint.key_env)
        self._lock = threading.Lock()
        self._earliest = {"requests": 0.0, "tokens": 0.0}  # start of the next request within each rate limit
        self._loop = EventLoopThread("reward endpoint")
        self._concurrent: asyncio.Semaphore
        self._client: Any
        self._finalizer: weakref.finalize[..., Any] | None = None  # closes the client

    async def post(self, request: Request) -> Any:
        """Send a request and return the reply as parsed JSON; may be awaited in any event loop.

        Raises:
            BudgetSpent: the request would exceed the budget; it is not sent.
            RuntimeError: no reply after all tries, or the server rejects the request: it redirects, or answers with a
                status 4xx other than 429.
            ValueError: the request has a value that JSON does not have, such as NaN.
        """
        self._open()
        return await asyncio.wrap_future(self._loop.submit(self._post(request)))

    async def _post(self, request: Request) -> Any:
        import httpx
        import tenacity

        content = None if request.body is None else _encoded(request.body)
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.endpoint.tries),
            wait=_pause,
            retry=tenacity.retry_if_exception(_is_temporary),
            reraise=True,
        )
        try:
            async with self._concurrent:
                with self._waits:
                    return await retrying(self._try, request, content)
        except httpx.HTTPStatusError as error:
            reply = error.response.text
            in_tries = f" in the last of {self.endpoint.tries} tries" if _is_temporary(error) else ""
            kind = ServerBusy if error.response.status_code == 429 else RunError
            raise kind(
                f"{self.endpoint} answered{in_tries}: {error.response.status_code} {self.shown(reply)!r}"
            ) from None
        except (httpx.RequestError, TimeoutError, ValueError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise RunError(f"{self.endpoint} gave no valid answer in {self.endpoint.tries} tries: {reason}") from None

    async def _try(self, request: Request, content: bytes | None) -> Any:
        """Send a request once, with its encoded body."""
        self._spend_budget(request)
        await asyncio.sleep(self._seconds_until_allowed(request.tokens))
        url = self._balancer.choose(request.text, even_excluded=True)
        assert url is not None
        try:
            return await self._try_at(url, request, content)
        except Exception as error:
            if _is_temporary(error):
                self._balancer.exclude(url, _LEFT_OUT_S)
            raise
        finally:
            self._balancer.release(url)

    async def _try_at(self, url: str, request: Request, content: bytes | None) -> Any:
        """Send a request to one of the servers."""
        headers = {} if content is None else {"Content-Type": "application/json"}
        method = "GET" if content is None else "POST"
        async with (
            asyncio.timeout(self.endpoint.timeout_s),
            self._client.stream(method, url, content=content, headers=headers) as response,
        ):
            body = await _whole_body(response)
        if response.is_error:
            self._correct_tokens(-request.tokens)  # a rejected request uses no tokens
        response.raise_for_status()
        reply = decoded(body)
        usage = reply.get("usage") if isinstance(reply, dict) else None
        used = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(used, int):
            self._correct_tokens(used - request.tokens)
        return reply

    def masked(self, reply: Any) -> str:
        """Return a reply as text without the key, which a server may repeat."""
        return str(reply) if self._key is None else str(reply).replace(self._key, "***")

    def shown(self, reply: Any) -> str:
        """Return the first characters of a reply for a message, masked before the text is cut."""
        return start_of_reply(self.masked(reply))

    def _correct_tokens(self, difference: int) -> None:
        with self._lock:
            self.tokens += difference

    def _spend_budget(self, request: Request) -> None:
        """Count a request before it is sent, so that simultaneous requests cannot exceed the budget."""
        with self._lock:
            for name, used, needed, limit in (
                ("requests", self.requests, 1, self.endpoint.max_requests),
                ("tokens", self.tokens, request.tokens, self.endpoint.max_tokens),
                ("seconds", round(self._waits.seconds, 1), 0, self.endpoint.max_seconds),
            ):
                if limit is not None and used + needed > limit:
                    more = f" and the next request may need {needed}" if needed else ""
                    raise BudgetSpent(
                        f"{self.endpoint}: the budget of {limit} {name} (max_{name}) is spent: {used} are used{more}; "
                        f"raise the budget or send fewer requests"
                    )
            self.requests += 1
            self.tokens += request.tokens

    def _seconds_until_allowed(self, tokens: int) -> float:
        """Return the seconds until a request may be sent within the rate limits; later ones come after it."""
        with self._lock:
            now = time.monotonic()
            start = max(now, *self._earliest.values())
            for name, amount, rate in (
                ("requests", 1, self.endpoint.requests_per_minute),
                ("tokens", tokens, self.endpoint.tokens_per_minute),
            ):
                if rate is not None:
                    self._earliest[name] = start + 60.0 * amount / rate
            return start - now

    def _open(self) -> None:
        """Open the HTTP client, unless it is open."""
        import httpx

        with self._lock:
            if self._finalizer is None or not self._finalizer.alive:
                headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
                concurrency = self.endpoint.concurrency * len(self.endpoint.urls)
                self._concurrent = asyncio.Semaphore(concurrency)
                self._client = httpx.AsyncClient(
                    headers=headers,
                    timeout=None,  # _try limits the whole time
                    limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
                    trust_env=False,
                )
                self._finalizer = weakref.finalize(self, _close, self._client, self._loop)

    def close(self) -> None:
        """Close connections and thread; another request starts new ones."""
        if self._finalizer is not None:
            self._finalizer()


class _Stopwatch:
    """Measures the time in which at least one task of an event loop is within its ``with``."""

    def __init__(self) -> None:
        self._tasks = 0
        self._began = self._before = 0.0

    @property
    def seconds(self) -> float:
        """Time so far, seconds."""
        return self._before + (time.monotonic() - self._began if self._tasks else 0.0)

    def __enter__(self) -> None:
        if not self._tasks:
            self._began = time.monotonic()
        self._tasks += 1

    def __exit__(self, *error: object) -> None:
        self._tasks -= 1
        if not self._tasks:
            self._before += time.monotonic() - self._began


def _close(client: Any, loop: EventLoopThread) -> None:
    async def close() -> None:
        await cancel_other_tasks()
        await client.aclose()

    loop.submit(close()).result()
    loop.close(timeout_s=None)


async def _whole_body(response: Any) -> bytes:
    """Read a reply, also one of an error, whose text is shown.

    Raises:
        ValueError: it is too long.
    """
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise UnreadableReply(f"more than {_MAX_BYTES >> 20} MiB")
    response._content = bytes(body)
    return bytes(body)


def decoded(body: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, or nested so deeply that it cannot be read.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise UnreadableReply("not JSON that can be read: its brackets are nested too deeply") from None


def _encoded(body: dict[str, Any]) -> bytes:
    """Encode the body of a request.

    Raises:
        ValueError: it has a value that JSON does not have, or text that is not valid Unicode.
    """
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UsageError(f"a request cannot be sent as JSON: {error}") from None


def read_key(name: str) -> str:
    """Read a key from an environment variable, without surrounding whitespace.

    Raises:
        ValueError: the variable is not set, or its value cannot be sent in a header. The value is not shown.
    """
    if not _VARIABLE.fullmatch(name):  # the key itself, by mistake
        raise UsageError(
            "key_env must be the name of an environment variable, of letters, digits and underscores, not the key "
            "itself"
        )
    key = os.environ.get(name, "").strip()
    if not key:
        raise UsageError(f"the environment variable {name!r} (key_env) is not set: set it to the API key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(
            f"the environment variable {name!r} (key_env) is not a valid key: it must be ASCII without spaces"
        )
    return key


def _is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, (httpx.RequestError, TimeoutError, ValueError))  # ValueError: the reply is not JSON


def _pause(state: Any) -> float:
    """Compute the seconds before the next try."""
    import httpx
    import tenacity

    error = state.outcome.exception()
    if isinstance(error, httpx.HTTPStatusError):
        retry_after = error.response.headers.get("Retry-After", "")
        if retry_after.isdecimal():
            return min(float(retry_after), _MAX_WAIT_S)
    return float(tenacity.wait_random_exponential(multiplier=0.5, max=_MAX_WAIT_S)(state))
