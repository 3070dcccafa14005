"""API key and listening socket of a server."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
import socket
from pathlib import Path

from lightning_rlhf.expected_errors import UsageError

_MIN_KEY_CHARACTERS = 16
_MAX_PORT = 65535


def load_key(variable: str | None, file: Path | None) -> tuple[str, str]:
    """Return the API key and a shell expression for it.

    Args:
        variable: environment variable with the key.
        file: file with the key; without ``variable`` and ``file``, a key is generated.

    Raises:
        ValueError: the key is missing, too short, or has characters other than visible ASCII.
    """
    if variable is not None:
        key = os.environ.get(variable, "")
        source = variable
        expression = f"${variable}"
    elif file is not None:
        if not file.is_file():
            raise UsageError(f"key file {file} not found")
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read a key from {file}: {error}") from error
        source = str(file)
        expression = f"$(cat {shlex.quote(str(file))})"
    else:
        key = secrets.token_urlsafe(32)
        return key, key
    if len(key) < _MIN_KEY_CHARACTERS or not all("!" <= letter <= "~" for letter in key):
        raise UsageError(
            f"{source} must contain a key of at least {_MIN_KEY_CHARACTERS} visible ASCII characters, for example from "
            f"`openssl rand -hex 32`"
        )
    return key, expression


def check_host(host: str, has_own_key: bool) -> None:
    """Validate that a server on a non-local address has a key set by the user.

    Args:
        host: address to listen on.
        has_own_key: whether the user set a key.

    Raises:
        ValueError: other machines can reach the address, but no key is set.
    """
    if not has_own_key and not is_local(host):
        raise UsageError(
            f"{host} can be reached from other machines, so set a key: --api-key-env NAME or --api-key-file FILE"
        )


def is_local(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Called before the model is loaded, to detect a port in use early.

    Raises:
        ValueError: the address cannot be used.
    """
    if not 0 <= port <= _MAX_PORT:
        raise UsageError(f"the port must be from 0 (a free one) to {_MAX_PORT}, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            f"cannot listen on {host}:{port}: {reason or error}; choose another --port or --host"
        ) from error
