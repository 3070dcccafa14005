"""The HTTP server below the stand-ins of endpoints, sandboxes and servers."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class HTTPStandIn(ThreadingHTTPServer):
    """Prints nothing when a client ends its connection: another test may be reading stderr by then."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
