"""A sandbox on another machine, behind SandboxFusion's HTTP protocol (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_rlhf.rewards.sandbox import Finished, Limits, SandboxFault, SandboxUnavailable

if TYPE_CHECKING:
    import httpx

_BUSY = (408, 425, 429, 500, 502, 503, 504)  # asking again may help
_ROOM = 2**16  # of an answer, beside what the program wrote
_INSTALL = "a RemoteSandbox needs httpx and tenacity: pip install 'lightning_rlhf[judge]'"


class _AskAgainError(RuntimeError):
    """The server could not answer now."""


@dataclass(frozen=True)
class RemoteSandbox:
    """Sends each program to a server that runs it: ``POST <url>/run_code``.

    The server's word is taken for how a program ended, so it must be one that keeps programs apart. A server that does
    not answer, or reports an error of its own, is asked again; that is never a program's failure.

    Args:
        url: of the server, such as http://sandbox:8080.
        concurrency: programs in flight at a time, over all threads.
        attempts: for each program, before the fault is raised.
        patience_seconds: waited for an answer, beyond the program's own time; the server may have a queue.
    """

    url: str
    concurrency: int = 32
    attempts: int = 5
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("url holds a name or password, and would be shown in messages: leave it out")
        for name in ("concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        try:
            import httpx  # noqa: F401
            import tenacity  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_INSTALL) from error
        self._slots, self._client  # noqa: B018 (made before there are threads)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.concurrency, self.attempts, self.patience_seconds)

    def check(self) -> str:
        """Have the server run a program whose answer is known.

        Raises:
            SandboxUnavailable: it does not answer, or not rightly.
        """
        try:
            found = self.run("print(int(input()) * 7)", "6\n", Limits())
        except SandboxFault as fault:
            raise SandboxUnavailable(f"no sandbox answers at {self.url}: {fault}; start SandboxFusion there") from fault
        if (found.stdout, found.exit_code) != ("42\n", 0):
            raise SandboxUnavailable(f"the server at {self.url} cannot run Python: 6 * 7 came to {found}")
        return f"SandboxFusion at {self.url}"

    def run(self, source: str, stdin: str, limits: Limits) -> Finished:
        """Have a program run to its end or to its limits.

        Raises:
            SandboxFault: the server could not say what came of it.
        """
        import httpx
        import tenacity

        request = {
            "code": source,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": limits.seconds,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_bytes // 2**20,
        }
        again = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            retry=tenacity.retry_if_exception_type((_AskAgainError, httpx.TransportError)),
            reraise=True,
        )
        try:
            found: Finished = again(self._ask, request, limits)
        except (_AskAgainError, httpx.TransportError) as error:
            said = str(error) or type(error).__name__
            raise SandboxFault(f"{self.url} failed {self.attempts} times, the last time with: {said}") from error
        return found

    def _ask(self, request: dict[str, Any], limits: Limits) -> Finished:
        room = 6 * 2 * limits.output_bytes + _ROOM  # two pipes, and JSON writes a character with six at most
        body = bytearray()
        timeout = 2 * limits.seconds + self.patience_seconds
        with self._slots, self._client.stream("POST", "/run_code", json=request, timeout=timeout) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > room:
                    return Finished("", "", None, truncated=True)
        if response.status_code in _BUSY:
            raise _AskAgainError(f"HTTP status {response.status_code}")
        if response.status_code != 200:
            said = body[:200].decode("utf-8", "replace")
            raise SandboxFault(f"{self.url} refused the request with HTTP status {response.status_code}: {said}")
        return self._understood(bytes(body), limits)

    def _understood(self, body: bytes, limits: Limits) -> Finished:
        try:
            answer = json.loads(body)
            status, result = answer["status"], answer["run_result"]
            if status == "SandboxError" or (result and result["status"] == "Error"):
                raise _AskAgainError(f"SandboxError: {str(answer['message'])[:200]}")
            ended, code = result["status"], result["return_code"]
            seconds = float(result["execution_time"] or 0.0)
            said, complained = (str(result[name] or "") for name in ("stdout", "stderr"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = body[:200].decode("utf-8", "replace")
            raise SandboxFault(f"{self.url} does not answer as SandboxFusion does: {shown!r} ({error!r})") from error
        most = limits.output_bytes
        if ended == "TimeLimitExceeded":
            return Finished(said[:most], complained[:most], None, timed_out=True, seconds=seconds)
        if ended != "Finished" or not isinstance(code, int):
            raise SandboxFault(f"{self.url} says that a program ended as {ended!r} with code {code!r}")
        too_much = max(len(said.encode("utf-8", "replace")), len(complained.encode("utf-8", "replace"))) > most
        return Finished(said[:most], complained[:most], None if too_much else code, truncated=too_much, seconds=seconds)

    @cached_property
    def _slots(self) -> threading.BoundedSemaphore:
        return threading.BoundedSemaphore(self.concurrency)

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.Client(base_url=self.url, limits=limits, trust_env=False)  # programs go through no proxy
