"""The end of a command by a signal before the run handles signals: one line, at once.

Python runs a handler between two of its instructions, so not while the process waits for other ranks in C++. Therefore
a thread receives the numbers of signals and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ending = threading.Lock()
_prints = False


def end_at_sigterm(prints: bool) -> None:
    """End this process when it receives SIGTERM, with code 143, until another handler is set. In the main thread.

    Args:
        prints: whether to print a line, which one process of a machine does.
    """
    global _prints
    _prints = prints
    if signal.getsignal(signal.SIGTERM) is _end:
        return
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.fileno())
    signal.signal(signal.SIGTERM, _end)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=[receiving, sending], name="signals", daemon=True).start()


@contextmanager
def ending_at(number: int) -> Iterator[None]:
    """End this process within the context when it receives a signal, if it is one that SIGTERM ends."""
    if signal.getsignal(signal.SIGTERM) is not _end:
        yield
        return
    previous = signal.signal(number, _end)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _watch(receiving: socket.socket, sending: socket.socket) -> None:
    while numbers := receiving.recv(64):
        for number in numbers:
            if signal.getsignal(number) is _end:
                _end(number, None)


def _end(number: int, frame: FrameType | None) -> None:
    if _ending.acquire(blocking=False):  # the thread and the main thread may both be here
        if _prints:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            os.write(2, f"lightning-rlhf: ended by {name}\n".encode())
        os._exit(128 + number)


def _forget() -> None:
    """Have a forked process end as others do, and not write to the thread of its parent."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
