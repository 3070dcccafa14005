"""Ends a process with all that it started when whoever asked for it is gone, however that went. Run as a script.

It starts a command in its own process group and waits until the command ends or its own standard input does, which the
kernel closes even behind a process that was killed; then it removes the folder in which the command had its sockets.
Plain Python, so that it starts at once and needs little memory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time

_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.2


def main(folder: str, command: list[str]) -> None:
    """Keep the command; ends with the whole process group, this process included.

    Args:
        folder: of the command's own, removed when it has ended.
        command: to run.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # is sent to the group, and the command starts with the default
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        pass
    if child.poll() is None:
        os.killpg(0, signal.SIGTERM)
        end = time.monotonic() + _GRACE_SECONDS
        while child.poll() is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # what the command left behind


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
