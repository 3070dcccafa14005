"""Hub to which all ranks of a run are connected, so that each learns at once when another one ends."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import threading
import weakref
from dataclasses import dataclass
from typing import Any

LOST_CONNECTION = "ended without a message: killed, or the machine is gone"
_HELLO_SECONDS = 10  # longest wait for the first message of a connection
_SETTLE_SECONDS = 0.5  # collects ranks of a lost machine, whose connections close one by one, into one report
_LONGEST_LINE = 1 << 16
# Detect a lost machine: probe after 10 s of silence, then every 5 s; close the connection after 30 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Wire:
    """JSON messages over a socket, one per line.

    Args:
        connection: connected socket, which is made blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # some exist on Linux only
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        reference = weakref.ref(connection)
        # Otherwise a forked process, such as a data loader's worker, would keep the connection open after this one.
        os.register_at_fork(after_in_child=lambda: _close(reference()))
        self.connection = connection
        self.ended = False
        self._unread = b""

    def send(self, **message: Any) -> None:
        """Send a message; a broken connection is ignored here and detected by :meth:`receive`."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hang_up(self) -> None:
        """Shut the connection down, so that both sides read its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for data and return the messages that are complete; at the end of the connection, an empty list."""
        try:
            read = self.connection.recv(_LONGEST_LINE)
        except OSError:
            read = b""
        if not read or len(self._unread) > _LONGEST_LINE:
            self.ended = True
            self.connection.close()
            return []
        *lines, self._unread = (self._unread + read).split(b"\n")
        return [json.loads(line) for line in lines]


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


@dataclass
class _Member:
    wire: Wire
    rank: int
    name: str
    node: int
    done: bool = False


class Hub:
    """Server thread to which every rank connects, rank 0 included; it runs until all ranks are done.

    Args:
        world_size: number of ranks.
        token: secret that a rank sends to join.
        several_nodes: whether to listen on all addresses instead of localhost only.
    """

    def __init__(self, world_size: int, token: str, several_nodes: bool) -> None:
        self.token, self._world_size = token, world_size
        if several_nodes and socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world_size
            )
        else:
            self._socket = socket.create_server(("" if several_nodes else "127.0.0.1", 0), backlog=world_size)
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._members: dict[int, _Member] = {}
        self._vanished: list[_Member] = []
        self._failed_ranks: set[int] = set()
        threading.Thread(target=self._serve, name="failure hub", daemon=True).start()

    def _serve(self) -> None:
        while len(self._members) < self._world_size or not all(member.done for member in self._members.values()):
            ready = self._selector.select(_SETTLE_SECONDS)
            for key, _ in ready:
                if key.data is None:
                    self._accept()
                else:
                    self._handle_messages(key.data)
            # Lightning's launcher polls its children every five seconds and then kills this process: report before it.
            on_this_node = any(member.node == 0 for member in self._vanished)
            if self._vanished and not self._failed_ranks and (on_this_node or not ready):
                self._report_failed(self._vanished, _lost_connection(self._vanished, list(self._members.values())))
            if self._failed_ranks and self._failed_ranks <= {member.rank for member in self._vanished}:
                self._send_to_others(kind="end")
                break
        self._selector.close()
        for member in self._members.values():
            member.wire.connection.close()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        connection.settimeout(_HELLO_SECONDS)
        try:
            hello = json.loads(connection.makefile("rb", buffering=0).readline(_LONGEST_LINE))
            known = hmac.compare_digest(hello["token"], self.token)
            member = _Member(Wire(connection), int(hello["rank"]), str(hello["name"]), int(hello["node"]))
        # Other clients, such as port scanners and health checks.
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            known = False
        if not known:
            connection.close()
            return
        self._members[member.rank] = member
        self._selector.register(connection, selectors.EVENT_READ, member)
        if len(self._members) == self._world_size:
            self._selector.unregister(self._socket)
            self._socket.close()

    def _handle_messages(self, member: _Member) -> None:
        for message in member.wire.receive():
            if message["kind"] == "failed" and not self._failed_ranks:
                self._report_failed([member], message["text"], message.get("code", 1))
            elif message["kind"] == "done":
                member.done = True
                if member.rank == 0:
                    self._send_to_others(kind="done")
        if member.wire.ended:
            self._selector.unregister(member.wire.connection)
            self._vanished += [] if member.done else [member]

    def _report_failed(self, failed: list[_Member], text: str, code: int = 1) -> None:
        self._failed_ranks = {member.rank for member in failed}
        self._send_to_others(kind="failed", text=text, code=code)

    def _send_to_others(self, **message: Any) -> None:
        for member in self._members.values():
            if member.rank not in self._failed_ranks:
                member.wire.send(**message)


def _lost_connection(gone: list[_Member], members: list[_Member]) -> str:
    """Return a message that lists the lost ranks, grouped by node where a node has lost all of its ranks."""
    gone = sorted(gone, key=lambda member: member.rank)
    nodes = {member.node for member in gone}
    whole = [node for node in sorted(nodes) if {m.rank for m in members if m.node == node} <= {m.rank for m in gone}]
    several = len({member.node for member in members}) > 1
    who = [f"node {node}: " * several + ", ".join(m.name for m in gone if m.node == node) for node in whole]
    who += [member.name for member in gone if member.node not in whole]
    return f"{'; '.join(who)} {LOST_CONNECTION}"
