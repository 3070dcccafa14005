"""Where a server listens, and with which key."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
import socket
from pathlib import Path

_KEY_CHARACTERS = 16
_LAST_PORT = 65535


def key_of(variable: str | None, file: Path | None) -> tuple[str, str]:
    """The key, and how it is written on a shell's command line.

    Args:
        variable: of the environment that holds it.
        file: that holds it; where both are None a key is made up.

    Raises:
        ValueError: there is none where it should be, or it is too short or too odd to be one.
    """
    if variable is not None:
        key, where, shown = os.environ.get(variable, ""), variable, f"${variable}"
    elif file is not None:
        if not file.is_file():
            raise ValueError(f"there is no file {file} to read the key from")
        try:
            key, where = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read a key from {file}: {error}") from error
        shown = f"$(cat {shlex.quote(str(file))})"
    else:
        key = secrets.token_urlsafe(32)
        return key, key
    if len(key) < _KEY_CHARACTERS or not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"{where} must hold a key of at least {_KEY_CHARACTERS} visible ASCII characters, for example from "
            f"`openssl rand -hex 32`"
        )
    return key, shown


def check_open(host: str, given_key: bool) -> None:
    """Refuse to listen to other machines without a key that its user has chosen.

    Args:
        host: to listen on.
        given_key: whether there is such a key.

    Raises:
        ValueError: there is none.
    """
    if not given_key and not is_local(host):
        raise ValueError(
            f"{host} can be reached from other machines, so give a key: --api-key-env NAME or --api-key-file FILE"
        )


def is_local(host: str) -> bool:
    """Whether only this machine reaches it; a name other than ``localhost`` may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port that is taken is known before the model loads.

    Raises:
        ValueError: it cannot be had.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ValueError(f"the port must be from 0 (a free one) to {_LAST_PORT}, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter: a name that is none
        said = error.strerror if isinstance(error, OSError) else None
        raise ValueError(f"cannot listen on {host}:{port}: {said or error}") from error
