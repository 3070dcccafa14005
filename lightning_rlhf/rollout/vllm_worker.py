"""The engine process: hosts vLLM and answers one trainer over a socket pair. Run by :mod:`.supervisor`.

Messages are JSON, one object each. From the trainer: ``start``, ``load``, ``swap``, ``sleep``, ``trace``, ``add``,
``close``. To the trainer: ``ready``, ``finished``, ``reply``, ``error`` (of one command), ``fatal`` (of the engine; the
process then ends).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> int:
    """Serve until the trainer closes its end of the socket.

    Args:
        descriptor: the inherited end of the socket pair.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the trainer
    connection = Connection(descriptor)

    def say(kind: str, **fields: Any) -> None:
        connection.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    try:
        arguments = json.loads(connection.recv_bytes())["arguments"]
        from vllm import __version__ as version

        from lightning_rlhf.rollout.vllm_core import VLLMCore

        core = VLLMCore(arguments)
        say("ready", version=version, pid=os.getpid(), **core.cache_size)
        while True:
            while connection.poll(0 if core.busy else None):
                message = json.loads(connection.recv_bytes())
                if message["kind"] == "close":
                    return 0
                _obey(core, message, say)
            for finished in core.step():
                say("finished", **finished)
    except EOFError:
        return 0
    except Exception as error:
        say("fatal", message=f"{type(error).__name__}: {error}")
        raise


def _obey(core: Any, message: dict[str, Any], say: Any) -> None:
    """Run one command; what it raises goes back to whoever asked, and the engine lives on."""
    asked = [request["id"] for request in message["requests"]] if message["kind"] == "add" else [message["id"]]
    try:
        if message["kind"] == "add":
            core.add(message["requests"])
        elif message["kind"] == "load":
            core.load(message["weights"], message["version"])
            say("reply", id=message["id"])
        elif message["kind"] == "swap":
            core.swap(message["adapter"], message["version"])
            say("reply", id=message["id"])
        elif message["kind"] == "sleep":
            core.sleep()
            say("reply", id=message["id"])
        elif message["kind"] == "trace":
            say("reply", id=message["id"], lost=core.lost(message["weights"]))
    except Exception as error:
        for identity in asked:
            say("error", id=identity, message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Tearing the interpreter down takes vLLM seconds, and there is nothing left to save.
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
