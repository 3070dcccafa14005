"""Download of images, never from this machine or a private network."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import urlsplit

from lightning_rlhf.images.bad import BadImage

_TIMEOUT_S = 30


def fetch(address: str, allowed: bool, max_bytes: int) -> bytes:
    """Return the content at an address, up to one byte more than the limit.

    Redirects are not followed, proxies are not used, and the connection goes to the address that was checked.

    Args:
        address: address with ``https://`` or ``http://``.
        allowed: whether images may be fetched.
        max_bytes: largest number of bytes.

    Raises:
        BadImage: images may not be fetched, the address is not public, or it has no such content.
    """
    shown = address if len(address) <= 100 else f"{address[:100]}..."
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadImage(
            f"the image {shown!r} has an invalid address: {error}", "an image's address is invalid"
        ) from error
    if parts.scheme not in ("https", "http") or not host:
        raise BadImage(
            f"the image {shown!r} has another protocol than https or http: use a path for a local file",
            "an image's address has another protocol than https or http",
        )
    if not allowed:
        raise BadImage(
            f"the image {shown!r} is not local: set remote: true under images to fetch it, or download it",
            "an image is not local",
        )
    port = port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        numbers = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not all(ipaddress.ip_address(number.partition("%")[0]).is_global for number in numbers):
            raise BadImage(
                f"the image {shown!r} is on this machine or in a private network, from which nothing is fetched",
                "an image's address is not public",
            )
        kind = _PinnedHTTPS if parts.scheme == "https" else _Pinned
        connection = kind(host, port, numbers[0])
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"User-Agent": "lightning-rlhf", "Accept": "image/*"})
            response = connection.getresponse()
            if response.status != 200:
                raise BadImage(
                    f"the image {shown!r} cannot be fetched: the server's status is {response.status}",
                    "an image cannot be fetched",
                )
            return _read(response, max_bytes + 1)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise BadImage(f"the image {shown!r} cannot be fetched: {error}", "an image cannot be fetched") from error


def _read(response: http.client.HTTPResponse, most: int) -> bytes:
    """Return the content, up to a number of bytes, within the time limit for all of it."""
    deadline, content = time.monotonic() + _TIMEOUT_S, bytearray()
    while len(content) < most and (part := response.read1(min(1 << 16, most - len(content)))):
        content += part
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took more than {_TIMEOUT_S} s")
    return bytes(content)


class _Pinned(http.client.HTTPConnection):
    """Connection to one IP address of a host.

    Args:
        host: name of the host.
        port: port of the host.
        number: IP address.
    """

    def __init__(self, host: str, port: int, number: str) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._number = number

    def connect(self) -> None:
        """Connect to the IP address, without another look-up of the name."""
        self.sock = socket.create_connection((self._number, self.port), _TIMEOUT_S)


class _PinnedHTTPS(_Pinned):
    """Encrypted connection to one IP address of a host, whose certificate is checked for the host's name."""

    def connect(self) -> None:
        """See :meth:`_Pinned.connect`."""
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
