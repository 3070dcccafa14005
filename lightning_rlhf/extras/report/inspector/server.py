"""The inspector's server: a page about runs that continue, on loopback, with a key in its address."""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from lightning_rlhf.callbacks.records.run_files import THUMBNAIL
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.records.values import as_json
from lightning_rlhf.extras.report.inspector.project import find_runs, project_data, project_page
from lightning_rlhf.extras.report.page import page_data, report_page
from lightning_rlhf.extras.report.run_directory import RunDirectory

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# A site that binds its name to 127.0.0.1 sends that name. The port is another one if it is forwarded.
_HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?", re.IGNORECASE)
_PATH = re.compile(r"(?:run/([0-9]{1,4})/|compare/([0-9]{1,4}(?:,[0-9]{1,4}){0,7})/)?(.*)", re.DOTALL)
_RESPONSES = re.compile(r"(responses|validations)/([0-9]{1,4})/([0-9]{1,9})")
_THUMBNAIL = re.compile(rf"images/([0-9]{{1,4}})/({THUMBNAIL})")
_TIMEOUT_S = 20  # of a client that sends or receives nothing
_PART = 1 << 16  # bytes that a client receives within the timeout
_Answer = tuple[int, str, str | bytes, str]  # status, type, content, tag


class InspectServer(ThreadingHTTPServer):
    """Serves the page, the data of the runs, and the responses of their steps. It only reads the run directories.

    It listens on 127.0.0.1 alone, and rejects requests without its random key or with another host name. It skips links
    out of the run directories, pipes, unknown files in ``rollouts/`` and damaged lines, and drops clients that are
    silent for 20 seconds. The page of a run asks for new data every 3 seconds, every 10 once the run has ended, and
    every 30 while its tab is hidden. The table of runs asks every 10 seconds, or every 60 while hidden. If nothing has
    changed, the answer is a few hundred bytes.

    Args:
        runs: runs of the page, at least one; those of a folder have separate pages.
        port: port; 0 chooses a free one.
        folder: folder whose runs are shown as a table, also those that begin later; None shows one page of all runs.

    Raises:
        UsageError: the port cannot be used.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, runs: Sequence[RunDirectory], port: int = 0, folder: Path | None = None) -> None:
        self.runs = list(runs)
        self.folder = folder
        self.key = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._made = ("", "")  # tag and content of the last data
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"port {port} cannot be used: {error.strerror}; choose another --port") from error

    @property
    def url(self) -> str:
        """Address of the page, with the key."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.key}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a client has closed, such as that of a closed tab, or does not use."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def table_of_runs(self, folder: Path) -> tuple[Path, list[RunDirectory], list[str]]:
        """Return the arguments of the table; runs that began after the last call are last, so that numbers stay."""
        with self._lock:
            self.runs += [run for run in find_runs(folder) if run not in self.runs]
            runs = list(self.runs)
        return folder, runs, [f"run/{number}/" for number in range(len(runs))]

    def made_once(self, tag: str, make: Callable[[], Any]) -> str:
        """Return data with a tag as JSON; equal data that several tabs request in turn is made once."""
        with self._lock:
            if self._made[0] != tag:
                self._made = (tag, as_json(make()))
            return self._made[1]


class _Handler(BaseHTTPRequestHandler):
    server: InspectServer
    server_version = "lightning-rlhf"
    sys_version = ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answer with the page, the data, the responses of a step or validation, or a thumbnail."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            text = (
                "This server answers to 127.0.0.1 and localhost only: open the address that lightning-rlhf inspect "
                "printed. For a run on another machine, forward a port: ssh -L 8001:127.0.0.1:PORT machine, and open "
                "the address with 127.0.0.1:8001."
            )
            self._send(403, "text/plain", text)
            return
        _, _, path = self.path.partition("/")
        key, slash, name = path.partition("/")
        if not secrets.compare_digest(key.encode(), self.server.key.encode()) or not slash:
            self._send(404, "text/plain", "open the address that lightning-rlhf inspect printed, with its key")
            return
        try:
            answer = self._page(name)
        except (UsageError, OSError) as error:  # a damaged file, or a run directory that is moved meanwhile
            answer = (500, "text/plain", str(error), "")
        self._send(*answer)

    def _page(self, name: str) -> _Answer:
        """Return the answer to a path without the key."""
        match = _PATH.fullmatch(name)
        assert match is not None
        one, several, rest = match.groups()
        folder, runs = self.server.folder, self.server.runs
        if folder is not None and (one or several):
            numbers = [int(number) for number in (one or several).split(",")]
            if max(numbers) < len(runs) and len(set(numbers)) == len(numbers):
                return self._page_of([runs[number] for number in numbers], rest)
        elif folder is not None and name in ("", "data"):
            arguments = self.server.table_of_runs(folder)
            if name == "":
                return 200, "text/html", project_page(*arguments, live=True), ""
            return self._data(arguments[1], False, lambda: project_data(*arguments))
        elif folder is None and rest == name:
            return self._page_of(runs, name)
        return 404, "text/plain", "unknown page", ""

    def _page_of(self, runs: Sequence[RunDirectory], name: str) -> _Answer:
        """Return the answer about some runs, whose responses have the numbers of the runs on their page."""
        if name == "":
            return 200, "text/html", report_page(runs, live=True), ""
        if name == "data":
            return self._data(runs, True, lambda: page_data(runs, live=True))
        image = _THUMBNAIL.fullmatch(name)
        if image is not None and int(image[1]) < len(runs):
            content = runs[int(image[1])].thumbnail(image[2])
            if content is not None:
                return 200, "image/jpeg", content, ""
        match = _RESPONSES.fullmatch(name)
        if match is None or int(match[2]) >= len(runs):
            return 404, "text/plain", "unknown page", ""
        kind: Literal["step", "validation"] = "step" if match[1] == "responses" else "validation"
        return 200, "application/json", as_json(runs[int(match[2])].rollouts(int(match[3]), kind)), ""

    def _data(self, runs: Sequence[RunDirectory], responses: bool, make: Callable[[], Any]) -> _Answer:
        """Return data that depends on the files of some runs, or that it has not changed.

        Args:
            runs: runs whose files determine the data.
            responses: whether the data depends on the files of responses.
            make: function that makes the data.
        """
        parts = [(str(run.path), run.signature(responses)) for run in runs]
        tag = f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            return 304, "", "", tag
        return 200, "application/json", self.server.made_once(tag, make), tag

    def _send(self, status: int, kind: str, content: str | bytes, tag: str = "") -> None:
        if isinstance(content, str):
            kind, content = f"{kind}; charset=utf-8", content.encode("utf-8", "replace")
        self.send_response(status)
        if tag:
            self.send_header("ETag", tag)
        if status != 304:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content), _PART):
            self.wfile.write(content[start : start + _PART])

    def end_headers(self) -> None:
        """Add the headers of all answers, also of errors."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
