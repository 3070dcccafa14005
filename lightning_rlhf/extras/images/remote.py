"""Download of images, never from this machine or a private network."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import quote, urlsplit

from typing_extensions import override

from lightning_rlhf.images import BadImage

_TIMEOUT_S = 30
_SAFE = "!#$%&'()*+,/:;=?@[]~"  # characters of an address that are sent as they are
_WITH_IPV4 = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96")))  # addresses that end with an IPv4 address
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")  # public by older versions of Python


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
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        numbers = list(dict.fromkeys(str(entry[4][0]) for entry in answers))
        if not all(map(_is_public, numbers)):
            raise BadImage(
                f"the image {shown!r} is on this machine or in a private network, from which nothing is fetched: use "
                f"its path",
                "an image's address is not public",
            )
        kind = _PinnedHTTPS if parts.scheme == "https" else _Pinned
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
        return _get(kind(host, port, numbers[0]), target, max_bytes + 1)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__  # some errors contain the server's answer
        raise BadImage(
            f"the image {shown!r} cannot be fetched: {reason}; download it, and use its path",
            "an image cannot be fetched",
        ) from error


def _get(connection: _Pinned, target: str, most: int) -> bytes:
    """Return the content at a path, up to a number of bytes.

    Raises:
        OSError: there is no such content, or the server is too slow.
    """
    connection.connect()
    deadline = time.monotonic() + _TIMEOUT_S
    end = threading.Timer(_TIMEOUT_S, connection.interrupt)  # each single wait for a slow server may be short
    end.daemon = True
    end.start()
    content = bytearray()
    try:
        connection.request("GET", target, headers={"User-Agent": "lightning-rlhf", "Accept": "image/*"})
        with connection.getresponse() as response:
            if response.status != 200:
                hint = ", and redirects are not followed" if 300 <= response.status < 400 else ""
                raise OSError(f"the server's status is {response.status}{hint}")
            while len(content) < most and (part := response.read1(min(1 << 16, most - len(content)))):
                content += part
    except (OSError, http.client.HTTPException):
        if time.monotonic() < deadline:
            raise
    finally:
        end.cancel()
        connection.close()
    if time.monotonic() >= deadline:
        raise TimeoutError(f"it took more than {_TIMEOUT_S} s")
    return bytes(content)


def _is_public(number: str) -> bool:
    """Return whether an IP address is that of a machine on the internet."""
    address = ipaddress.ip_address(number.partition("%")[0])
    if any(address in network for network in _WITH_IPV4):
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if isinstance(address, ipaddress.IPv6Address):  # forms that reach an IPv4 address through a relay
        inner = [address.sixtofour, address.ipv4_mapped, *(address.teredo or ())]
        return _is_on_internet(address) and all(each is None or _is_on_internet(each) for each in inner)
    return _is_on_internet(address)


def _is_on_internet(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and address not in _LOCAL_NAT64


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
        self._open: socket.socket | None = None

    def connect(self) -> None:
        """Connect to the IP address, without another look-up of the name."""
        self.sock = self._open = socket.create_connection((self._number, self.port), _TIMEOUT_S)

    def interrupt(self) -> None:
        """End each wait for the server, from another thread."""
        with contextlib.suppress(OSError):  # closed already
            if self._open is not None:  # http.client forgets the socket where the server closes the connection
                self._open.shutdown(socket.SHUT_RDWR)


class _PinnedHTTPS(_Pinned):
    """Encrypted connection to one IP address of a host, whose certificate is checked for the host's name."""

    default_port = 443  # which the header Host omits

    @override
    def connect(self) -> None:
        super().connect()
        self.sock = self._open = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
