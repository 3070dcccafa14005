"""The HTTP client of a server: replies that are too long, slow, nested or cut off are errors."""

import contextlib
import socket
import threading
import time
from http.client import HTTPConnection, IncompleteRead

import pytest

from lightning_rlhf.expected_errors import EngineDied
from lightning_rlhf.extras.servers import client
from lightning_rlhf.extras.servers.client import VLLMServer


def test_answers_that_are_too_long_slow_or_nested_are_named(stubs, monkeypatch):
    server = VLLMServer(stubs[0].url, None, 10)
    stubs[0].answers["/server_info"] = 200, b"[" * 200_000
    with pytest.raises(EngineDied, match=rf"{stubs[0].url} .*its response is not JSON: maximum recursion"):
        server.get("/server_info")
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 10)
    stubs[0].answers["/server_info"] = 200, b" " * 2000
    with pytest.raises(EngineDied, match=r"a response of more than 0 MiB"):
        server.get("/server_info")
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 20)
    with drip() as url, pytest.raises(EngineDied, match=r"no response for 0\.5 s"):
        VLLMServer(url, None, 10).get("/server_info", seconds=0.5)


@pytest.mark.parametrize("body", [b"", b'{"a": 1}'])
def test_a_reply_that_is_cut_off_is_an_error(body):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + body)

        thread = threading.Thread(target=serve)
        thread.start()
        connection = HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=10)
        connection.request("GET", "/")
        with pytest.raises(IncompleteRead):
            client._whole_body(connection.getresponse(), time.monotonic() + 10)
        thread.join()
        connection.close()


@contextlib.contextmanager
def drip():
    """Serve a response of which a byte comes every tenth of a second, so that no single wait is long."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve():
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not ended.wait(0.1):
                connection.sendall(b" ")

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    ended.set()
    thread.join()
    listening.close()
