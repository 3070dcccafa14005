"""A sandbox on another machine, through SandboxFusion's HTTP protocol (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult, SandboxFault, SandboxUnavailable
from lightning_rlhf.ranges import check_ranges

if TYPE_CHECKING:
    import httpx

_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
_OVERHEAD_BYTES = 2**16  # size of a reply without the program's output
_INSTALL = "a RemoteSandbox needs httpx and tenacity: pip install 'lightning-rlhf[judge]'"


class _TemporaryError(RuntimeError):
    """The server cannot run the program now; a retry may succeed."""


@dataclass(frozen=True)
class RemoteSandbox:
    """Sends each program to a server that runs it: ``POST <url>/run_code``.

    Your server must isolate programs from each other, because its result is trusted. If it is busy, does not reply or
    reports ``SandboxError``, the request is repeated. Such errors never count as a failure of the program.

    Args:
        url: URL of the server, such as http://sandbox:8080.
        concurrency: most concurrent requests, over all threads.
        attempts: requests for each program before an error is raised.
        patience_seconds: time to wait for a reply in addition to the program's limit, because the server may queue
            programs.
    """

    url: str
    concurrency: int = 32
    attempts: int = 5
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"url must begin with http:// or https://, got {self.url!r}")
        if "@" in urlsplit(self.url).netloc:
            raise UsageError("url must not contain a user name or password, because messages show it")
        check_ranges(self, concurrency="at least 1", attempts="at least 1")
        try:
            import httpx  # noqa: F401
            import tenacity  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingPackageError(_INSTALL) from error
        self._slots, self._client  # noqa: B018 (created before threads use them)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.concurrency, self.attempts, self.patience_seconds)

    def check(self) -> str:
        """Run a program with a known result on the server.

        Raises:
            SandboxUnavailable: the server does not reply, or its result is wrong.
        """
        try:
            result = self.run("print(int(input()) * 7)", "6\n", Limits())
        except SandboxFault as fault:
            raise SandboxUnavailable(f"no sandbox replies at {self.url}: {fault}; start SandboxFusion there") from fault
        if (result.stdout, result.exit_code) != ("42\n", 0):
            raise SandboxUnavailable(f"the server at {self.url} cannot run Python: 6 * 7 returned {result}")
        return f"SandboxFusion at {self.url}"

    def run(self, source: str, stdin: str, limits: Limits) -> ProgramResult:
        """Run a program on the server until it ends or exceeds its limits.

        Raises:
            SandboxFault: the server returned no result.
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
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            retry=tenacity.retry_if_exception_type((_TemporaryError, httpx.TransportError)),
            reraise=True,
        )
        try:
            return retrying(self._request, request, limits)
        except (_TemporaryError, httpx.TransportError) as error:
            reason = str(error) or type(error).__name__
            raise SandboxFault(f"{self.url} failed {self.attempts} times; last error: {reason}") from error

    def _request(self, request: dict[str, Any], limits: Limits) -> ProgramResult:
        max_bytes = 6 * 2 * limits.output_bytes + _OVERHEAD_BYTES  # two pipes; JSON escapes need at most six characters
        body = bytearray()
        timeout = 2 * limits.seconds + self.patience_seconds
        with self._slots, self._client.stream("POST", "/run_code", json=request, timeout=timeout) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    return ProgramResult("", "", None, truncated=True)
        if response.status_code in _RETRIED_STATUS:
            raise _TemporaryError(f"HTTP status {response.status_code}")
        if response.status_code != 200:
            text = body[:200].decode("utf-8", "replace")
            raise SandboxFault(f"{self.url} rejected the request with HTTP status {response.status_code}: {text}")
        return self._parse(bytes(body), limits)

    def _parse(self, body: bytes, limits: Limits) -> ProgramResult:
        try:
            reply = json.loads(body)
            result = reply["run_result"]
            if reply["status"] == "SandboxError" or (result and result["status"] == "Error"):
                raise _TemporaryError(f"SandboxError: {str(reply['message'])[:200]}")
            status, code = result["status"], result["return_code"]
            seconds = float(result["execution_time"] or 0.0)
            stdout, stderr = str(result["stdout"] or ""), str(result["stderr"] or "")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = body[:200].decode("utf-8", "replace")
            raise SandboxFault(f"{self.url} replied in an unknown format: {shown!r} ({error!r})") from error
        limit = limits.output_bytes
        if status == "TimeLimitExceeded":
            return ProgramResult(stdout[:limit], stderr[:limit], None, timed_out=True, seconds=seconds)
        if status != "Finished" or not isinstance(code, int):
            raise SandboxFault(f"{self.url} returned an unknown result of a program: status {status!r}, code {code!r}")
        truncated = any(len(text.encode("utf-8", "replace")) > limit for text in (stdout, stderr))
        exit_code = None if truncated else code
        return ProgramResult(stdout[:limit], stderr[:limit], exit_code, truncated=truncated, seconds=seconds)

    @cached_property
    def _slots(self) -> threading.BoundedSemaphore:
        return threading.BoundedSemaphore(self.concurrency)

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.Client(base_url=self.url, limits=limits, trust_env=False)  # ignores proxy variables
