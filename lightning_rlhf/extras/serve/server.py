"""The process that runs vLLM's OpenAI server; started by :class:`~lightning_rlhf.extras.serve.process.ServerProcess`.

It reads its settings as one line of JSON from standard input, whose end then signals that the parent has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning_rlhf.extras.serve.limits import HEADER_BYTES, HEADERS_TOO_LONG, Limits, Rejected
from lightning_rlhf.extras.serve.middleware import error_body

_GRACE_SECONDS = 10.0
_CONNECTIONS = 1024


class TimeLimitedProtocol(H11Protocol):
    """HTTP protocol that closes a connection if the headers of a request are not received in time.

    uvicorn has no time limit for the first request of a connection and for incomplete headers. The rest of a request
    that is rejected before its end is discarded in the same time: a connection that is closed with unread data is
    reset, and the client may lose the response.
    """

    read_seconds = 10.0
    _deadline: asyncio.TimerHandle | None = None
    _discards = False

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Process data and stop the time limit when the headers are complete."""
        if self._discards:
            return
        super().data_received(data)
        if self._idle:
            self._start_deadline()
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """Reject a request that is malformed or has too long headers."""
        received, _ = self.conn.trailing_data
        rejected = Rejected(431, HEADERS_TOO_LONG) if len(received) > HEADER_BYTES else Rejected(400, msg)
        body = json.dumps(error_body(rejected)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "cache-control": "no-store",
            "connection": "close",
        }
        reason = HTTPStatus(rejected.status).phrase
        for event in (
            h11.Response(status_code=rejected.status, headers=list(headers.items()), reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        if not self._idle:  # the body is malformed: closing the connection cancels the request
            self.transport.close()
            return
        self._discards = True
        self.transport.write_eof()
        self._start_deadline()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.read_seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self._idle and not self.transport.is_closing():
            self.transport.close()


def uvicorn_options(limits: Limits) -> dict[str, Any]:
    """Return the options of ``uvicorn.Config``, with limits for connections.

    Args:
        limits: limits of requests.
    """
    return {
        "http": type("Protocol", (TimeLimitedProtocol,), {"read_seconds": limits.read_seconds}),
        "ws": "none",
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "limit_concurrency": max(_CONNECTIONS, 4 * limits.concurrency),
        "timeout_keep_alive": 5,
        "timeout_graceful_shutdown": 5,
        "h11_max_incomplete_event_size": HEADER_BYTES,
        "backlog": _CONNECTIONS,
    }


@contextmanager
def killed_with_parent(folder: str) -> Iterator[None]:
    """Kill this process's group when the ``with`` block ends, or when the parent closes standard input or dies.

    Args:
        folder: temporary folder, removed before the group is killed.
    """

    def end_group() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        kill_group()

    def kill_group() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # vLLM replaces this handler later
    threading.Thread(target=end_group, daemon=True).start()
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        kill_group()


def server_options(arguments: list[str]) -> Any:
    """Parse the command line of ``vllm serve`` and prepare the environment as this command does."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(options)
    return options


async def serve(listening: socket.socket, arguments: list[str], key: str, limits: Limits) -> None:
    """Run vLLM's server with the middleware until a signal ends it.

    Args:
        listening: socket that accepts the connections.
        arguments: command line of ``vllm serve``.
        key: API key.
        limits: limits of requests.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http

    from lightning_rlhf.data.tokenizers import load_tokenizer
    from lightning_rlhf.extras.serve.middleware import RequestGuard

    options = server_options(arguments)
    tokenizer = load_tokenizer(options.model)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    async with build_async_engine_client(options) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(options, tasks, engine.model_config)
        await init_app_state(engine, app.state, options, tasks)
        # add_middleware() raises here, because vLLM's build_app() has already built the stack.
        stack = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = RequestGuard(stack, key, limits, count_tokens)
        host, port = listening.getsockname()[:2]
        shutdown = await serve_http(app, sock=listening, host=host, port=port, **uvicorn_options(limits))
    await shutdown


def main() -> None:
    """Read the settings from standard input and run the server."""
    settings = json.loads(_read_line())
    with killed_with_parent(settings["folder"]):
        listening = socket.socket(fileno=settings["descriptor"])
        asyncio.run(serve(listening, settings["arguments"], settings["key"], Limits(**settings["limits"])))


def _read_line() -> bytes:
    """Read one line of standard input, unbuffered, so that no later input is consumed."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise EOFError("the parent closed standard input before it sent the settings")
        line += byte
    return line


if __name__ == "__main__":
    main()
