"""The inspector's server: a page about runs that continue, on loopback, with a key in its address."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.inspect.page import as_json, report_page, run_data
from lightning_rlhf.inspect.run_directory import RunDirectory

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class InspectServer(ThreadingHTTPServer):
    """Serves the page, the data of the runs, and the responses of their steps. It only reads the run directories.

    It listens on 127.0.0.1 alone, and rejects requests without its random key or with another host name.

    Args:
        runs: at least one run.
        port: port; 0 chooses a free one.

    Raises:
        UsageError: the port cannot be used.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, runs: Sequence[RunDirectory], port: int = 0) -> None:
        self.runs = list(runs)
        self.key = secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"port {port} cannot be used: {error.strerror}; choose another --port") from error

    @property
    def url(self) -> str:
        """Address of the page, with the key."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.key}/"


class _Handler(BaseHTTPRequestHandler):
    server: InspectServer

    def do_GET(self) -> None:
        """Answer with the page, the data, or the responses of a step."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):  # a site that rebound its name
            self._send(403, "text/plain", "this server has only the address that lightning-rlhf inspect printed")
            return
        _, _, path = self.path.partition("/")
        key, slash, name = path.partition("/")
        if not secrets.compare_digest(key.encode(), self.server.key.encode()) or not slash:
            self._send(404, "text/plain", "open the address that lightning-rlhf inspect printed, with its key")
            return
        runs = self.server.runs
        responses = re.fullmatch(r"responses/(\d{1,4})/(\d{1,9})", name)
        try:
            if name == "":
                self._send(200, "text/html", report_page(runs, live=True))
            elif name == "data":
                self._send(200, "application/json", as_json(run_data(runs)))
            elif responses and int(responses[1]) < len(runs):
                self._send(200, "application/json", as_json(runs[int(responses[1])].rollouts(int(responses[2]))))
            else:
                self._send(404, "text/plain", "unknown page")
        except (UsageError, OSError) as error:  # a damaged file, or a run directory that is moved meanwhile
            self._send(500, "text/plain", str(error))

    def _send(self, status: int, kind: str, content: str) -> None:
        payload = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
