"""Images are fetched from public addresses only, without redirects, and within limits of time and size."""

import contextlib
import http.server
import io
import socket
import ssl
import threading
import time
from types import SimpleNamespace

import pytest
from PIL import Image

from lightning_rlhf.extras.images import remote
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.extras.images.remote import fetch
from lightning_rlhf.images import BadImage, ImageSettings
from tests.http_stand_in import HTTPStandIn

PUBLIC = "93.184.216.34"
LIMIT_S = 0.3


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (5, 7), "red").save(buffer, "PNG")
    return buffer.getvalue()


def send(handler, content, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def drip(handler, content):
    """Send bytes with a short wait after each, so that no single wait reaches the limit."""
    for byte in content:
        handler.wfile.write(bytes([byte]))
        time.sleep(LIMIT_S / 4)


def endless(handler):
    send(handler, b"")
    while True:
        handler.wfile.write(bytes(1 << 16))


PAGES = {
    "/a.png": lambda handler: send(handler, png()),
    "/a%20b%C3%A4.png?size=1&x=%2F": lambda handler: send(handler, png()),
    "/page": lambda handler: send(handler, b"<!DOCTYPE html><html>not found</html>"),
    "/moved": lambda handler: send(handler, b"", 302, Location="http://127.0.0.1/a.png"),
    "/gone": lambda handler: send(handler, png(), 404),
    "/broken": lambda handler: send(handler, b"", 500),
    "/short": lambda handler: send(handler, png()[:40], **{"Content-Length": "100"}),
    "/silent": lambda handler: time.sleep(5 * LIMIT_S),
    "/slow_headers": lambda handler: drip(handler, b"HTTP/1.1 200 OK\r\nA: b\r\n" * 9),
    "/slow_content": lambda handler: (send(handler, b"", **{"Content-Length": "99"}), drip(handler, bytes(99))),
    "/slow_chunks": lambda handler: (
        send(handler, b"", **{"Transfer-Encoding": "chunked"}), drip(handler, b"0" * 99)
    ),
    "/slow_to_the_end": lambda handler: (send(handler, b""), drip(handler, bytes(99))),
    "/endless": endless,
    "/no_answer": lambda handler: None,
    "/no_HTTP": lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"),
}  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        self.close_connection = True
        with contextlib.suppress(OSError):  # the other side ends the connection
            PAGES[self.path](self)

    def log_message(self, *arguments):
        pass


class Server(HTTPStandIn):
    block_on_close = False


@pytest.fixture
def server(monkeypatch):
    """A server of this machine that the name pictures.example leads to, as if it were at a public address."""
    made = Server(("127.0.0.1", 0), Handler)
    made.requests, made.connections, made.lookups = [], [], []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()

    def look_up(host, port, **options):
        made.lookups.append(host)
        first = PUBLIC if len(made.lookups) == 1 else "127.0.0.1"  # as an attacker's name server would answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (first, port))]

    def connect_here(address, timeout):
        made.connections.append(address)
        connection = socket.socket()
        connection.settimeout(timeout)
        connection.connect(made.server_address)
        return connection

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect_here)
    monkeypatch.setattr(remote, "_TIMEOUT_S", LIMIT_S)
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def no_connection(monkeypatch):
    """Fail the test at the first connection."""
    monkeypatch.setattr(socket, "create_connection", lambda *arguments: pytest.fail(f"connects to {arguments[0]}"))


def reason_of(address, max_bytes=1000, allowed=True):
    with pytest.raises(BadImage) as caught:
        fetch(address, allowed, max_bytes)
    message = str(caught.value)
    assert message.startswith(f"the image {address[:60]!r}"[:60])
    assert "\n" not in message
    assert address not in caught.value.kind
    return message


# -- good addresses ---------------------------------------------------------------------------------------------------


def test_content_is_fetched_from_the_address_that_was_checked(server):
    assert fetch("http://pictures.example/a.png", True, 1000) == png()
    assert (server.lookups, server.connections) == (["pictures.example"], [(PUBLIC, 80)])
    ((path, headers),) = server.requests
    assert (path, headers["Host"]) == ("/a.png", "pictures.example")
    assert not {"Authorization", "Cookie"} & headers.keys()


def test_image_of_a_row_is_fetched(server):
    image = read_image("http://pictures.example/a.png", ImageSettings(remote=True), None)
    assert (image.width, image.height, image.read()) == (5, 7, png())
    assert len(server.requests) == 1


def test_port_and_query_are_sent_and_other_letters_are_quoted(server):
    assert fetch("http://user:word@pictures.example:8080/a b\u00e4.png?size=1&x=%2F#part", True, 1000) == png()
    assert server.connections == [(PUBLIC, 8080)]
    assert server.requests[0][1]["Host"] == "pictures.example:8080"


def test_proxies_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch("http://pictures.example/a.png", True, 1000) == png()


def test_certificate_is_checked_for_the_name_of_the_host(server, monkeypatch):
    context, names = ssl.create_default_context(), []
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)

    def wrap(connection, server_hostname):
        names.append(server_hostname)
        return connection

    monkeypatch.setattr(ssl, "create_default_context", lambda: SimpleNamespace(wrap_socket=wrap))
    assert fetch("https://pictures.example/a.png", True, 1000) == png()
    assert (names, server.connections) == (["pictures.example"], [(PUBLIC, 443)])
    assert server.requests[0][1]["Host"] == "pictures.example"


def test_server_without_encryption_is_no_server_of_https(server):
    assert "cannot be fetched: [SSL" in reason_of("https://pictures.example/a.png")
    assert server.requests == []


# -- addresses that are not public ------------------------------------------------------------------------------------

NOT_PUBLIC = (
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    "2002:c0a8:1::5", "2002:0a00:0001:8000::", "::127.0.0.1", "64:ff9b:1::7f00:1", "2001:0:7f00:1::",
)  # fmt: skip


@pytest.mark.parametrize("number", NOT_PUBLIC)
def test_name_of_a_private_address_is_not_connected_to(no_connection, monkeypatch, number):
    for numbers in ([number], [PUBLIC, number]):
        answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in numbers]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, answers=answers, **__: answers)
        assert reason_of("http://pictures.example/a.png") == (
            "the image 'http://pictures.example/a.png' is on this machine or in a private network, from which nothing "
            "is fetched: use its path"
        )


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0", "[::1]", "10.0.0.1", "169.254.169.254",
        "[::ffff:127.0.0.1]", "user@127.0.0.1", "pictures.example@127.0.0.1", "localhost:8000",
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_this_machine_and_private_networks_are_not_connected_to(no_connection, host, scheme):
    message = reason_of(f"{scheme}://{host}/a.png")
    assert "is on this machine or in a private network" in message or "cannot be fetched: [Errno" in message  # no name


@pytest.mark.parametrize("number", [PUBLIC, "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"])
def test_public_addresses_are_recognized(number):
    assert remote._is_public(number)


# -- other addresses ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_lookup(monkeypatch):
    """Fail the test at the first look-up of a name."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"looks up {host}"))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("file:///etc/hostname", "has another protocol than https or http: use a path for a local file"),
        ("ftp://pictures.example/a.png", "has another protocol than https or http"),
        ("gopher://pictures.example/a.png", "has another protocol than https or http"),
        ("javascript://pictures.example/a.png", "has another protocol than https or http"),
        ("http:///a.png", "has another protocol than https or http"),
        ("http://[::1/a.png", "has an invalid address: Invalid IPv6 URL"),
        ("http://pictures.example:99999/a.png", "has an invalid address: Port out of range 0-65535"),
        ("http://pictures.example:many/a.png", "has an invalid address: Port could not be cast to integer value"),
    ],
)
def test_other_addresses_are_rejected_before_the_name_is_looked_up(no_lookup, address, reason):
    assert reason in reason_of(address)
    assert reason in reason_of(address, allowed=False)


@pytest.mark.parametrize("address", ["http://pictures.example/a.png", "HTTPS://127.0.0.1/a.png"])
def test_nothing_is_fetched_without_remote(no_lookup, address):
    assert reason_of(address, allowed=False) == (
        f"the image {address!r} is not local: set remote: true under images to fetch it, or download it"
    )


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..example"])
def test_names_that_cannot_be_looked_up_are_bad(no_connection, host):
    assert "cannot be fetched" in reason_of(f"http://{host}/a.png")


def test_long_addresses_are_shortened(no_lookup):
    address = "http://pictures.example/" + "a" * 5000
    assert len(reason_of(address, allowed=False)) < 250


# -- servers that do not give an image --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("moved", "cannot be fetched: the server's status is 302, and redirects are not followed; download it"),
        ("gone", "cannot be fetched: the server's status is 404; download it, and use its path"),
        ("broken", "cannot be fetched: the server's status is 500; download it, and use its path"),
        ("no_answer", "cannot be fetched: Remote end closed connection without response"),
        ("no_HTTP", "cannot be fetched: SSH-2.0-OpenSSH"),
    ],
)
def test_other_answers_are_bad_images_and_are_not_followed(server, path, reason):
    assert reason in reason_of(f"http://pictures.example/{path}")
    assert (len(server.requests), server.lookups) == (1, ["pictures.example"])


@pytest.mark.parametrize("path", ["silent", "slow_headers", "slow_content", "slow_chunks", "slow_to_the_end"])
def test_slow_servers_are_left_at_the_limit_of_time(server, path):
    start = time.monotonic()
    message = reason_of(f"http://pictures.example/{path}")
    assert "cannot be fetched: it took more than 0.3 s" in message or "cannot be fetched: timed out" in message
    assert LIMIT_S * 0.9 < time.monotonic() - start < 4


def test_refused_connection_is_a_bad_image(server, monkeypatch):
    def refuse(address, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert "cannot be fetched: [Errno 111] Connection refused" in reason_of("http://pictures.example/a.png")


def test_content_is_cut_one_byte_after_the_limit(server):
    assert len(fetch("http://pictures.example/endless", True, 100_000)) == 100_001


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("endless", "has more than 100000 bytes: make it smaller, or raise max_bytes under images"),
        ("page", "cannot be decoded: its format is not known"),
        ("short", "cannot be decoded"),
    ],
)
def test_other_content_is_a_bad_image(server, path, reason):
    address = f"http://pictures.example/{path}"
    with pytest.raises(BadImage, match=f"the image '{address}' {reason}"):
        read_image({"url": address}, ImageSettings(remote=True, max_bytes=100_000), None)
