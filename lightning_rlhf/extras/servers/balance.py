"""Distribution of requests between servers."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Generic, TypeVar

Server = TypeVar("Server", bound=Hashable)
_BLOCK = 16  # tokens; shorter common beginnings of texts are ignored
_KEPT_BLOCKS = 1 << 17  # blocks of texts that are remembered for each server, those used last
_SLACK = 8  # largest number of requests that a server may have more than another one, because it knows a text


class Balancer(Generic[Server]):
    """Choice of a server for each request, by any thread.

    Among the servers that have at most eight unfinished requests more than another one, a request goes to the server
    that has had the longest beginning of its text, which may be in its cache; if there are several, to the one with the
    fewest unfinished requests.

    Args:
        servers: servers, in the order in which equal ones are chosen.
    """

    def __init__(self, servers: Iterable[Server] = ()) -> None:
        self._lock = Lock()
        self._unfinished = dict.fromkeys(servers, 0)
        self._excluded_until = dict.fromkeys(self._unfinished, -math.inf)
        self._blocks: dict[Server, OrderedDict[int, None]] = {server: OrderedDict() for server in self._unfinished}

    def add(self, server: Server) -> None:
        """Add a server."""
        with self._lock:
            self._unfinished.setdefault(server, 0)
            self._excluded_until.setdefault(server, -math.inf)
            self._blocks.setdefault(server, OrderedDict())

    def remove(self, server: Server) -> None:
        """Remove a server, which may have unfinished requests."""
        with self._lock:
            for of_servers in (self._unfinished, self._excluded_until, self._blocks):
                of_servers.pop(server, None)

    def exclude(self, server: Server, seconds: float = math.inf) -> None:
        """Choose a server no more, for some seconds or until :meth:`include`."""
        with self._lock:
            if server in self._excluded_until:
                self._excluded_until[server] = time.monotonic() + seconds

    def include(self, server: Server) -> None:
        """End the exclusion of a server."""
        with self._lock:
            if server in self._excluded_until:
                self._excluded_until[server] = -math.inf

    def forget_texts(self) -> None:
        """Discard the texts of all servers, after their caches were emptied."""
        with self._lock:
            for blocks in self._blocks.values():
                blocks.clear()

    def choose(self, text: Sequence[int] = (), even_excluded: bool = False) -> Server | None:
        """Return the server for a request, which is unfinished until :meth:`release`.

        Args:
            text: token ids of the request, as far as they are known.
            even_excluded: whether to choose among all servers if all are excluded.

        Returns:
            The server; None if all are excluded.
        """
        blocks = list(_hashes(text))
        with self._lock:
            now = time.monotonic()
            usable = [server for server, until in self._excluded_until.items() if until <= now]
            if not usable and even_excluded:
                usable = list(self._excluded_until)
            if not usable:
                return None
            fewest = min(self._unfinished[server] for server in usable)
            candidates = [server for server in usable if self._unfinished[server] <= fewest + _SLACK]
            server = max(candidates, key=lambda each: (self._known(each, blocks), -self._unfinished[each]))
            self._unfinished[server] += 1
            self._remember(server, blocks)
            return server

    def release(self, server: Server, text: Sequence[int] = ()) -> None:
        """End a request.

        Args:
            server: its server.
            text: token ids of the request and its response, which may begin a later request.
        """
        blocks = list(_hashes(text))
        with self._lock:
            if server in self._unfinished:
                self._unfinished[server] -= 1
                self._remember(server, blocks)

    def _known(self, server: Server, blocks: list[int]) -> int:
        """Return the number of first blocks of a text that a server has had."""
        known = self._blocks[server]
        return next((index for index, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, server: Server, blocks: list[int]) -> None:
        known = self._blocks[server]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > _KEPT_BLOCKS:
            known.popitem(last=False)


def _hashes(text: Sequence[int]) -> Iterator[int]:
    """Yield a hash of the text up to the end of each block."""
    value = 0
    for end in range(_BLOCK, len(text) + 1, _BLOCK):
        value = hash((value, *text[end - _BLOCK : end]))
        yield value
