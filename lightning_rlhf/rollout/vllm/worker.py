"""Main program of the engine process, which runs vLLM for one trainer. Started by :mod:`.supervisor`.

Commands are executed in order. Those that change the weights wait until all requests are finished, and later commands
wait for them, so the completions of a request do not depend on when later weights arrive. Weights with ``in_flight``
are loaded at once: unfinished responses continue with them, or end if ``cut`` is set.

Messages are JSON objects over a socket pair. From the trainer: ``start``, ``load``, ``open_buffers``, ``load_part``,
``finish_parts``, ``swap``, ``sleep``, ``trace``, ``adapter_sums``, ``images``, ``add``, ``close``. To the trainer:
``ready``, ``finished``, ``reply``, ``error`` (a command failed), ``alive`` (at intervals while it computes), ``fatal``
(the engine failed and the process ends).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from lightning_rlhf.processes.child import end_with_parent

_ALIVE_SECONDS = 10.0
_NEED_IDLE_ENGINE = ("load", "open_buffers", "load_part", "finish_parts", "swap", "sleep", "trace", "adapter_sums")


def main(descriptor: int) -> int:
    """Execute commands until the trainer closes its end of the socket.

    Args:
        descriptor: inherited file descriptor of the socket.
    """
    end_with_parent()
    connection = Connection(descriptor)

    def send(kind: str, **fields: Any) -> None:
        connection.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    try:
        arguments = json.loads(connection.recv_bytes())["arguments"]
        from vllm import __version__ as version

        from lightning_rlhf.rollout.vllm.core import VLLMCore

        core = VLLMCore(arguments)
        send("ready", version=version, pid=os.getpid(), **core.facts)
        commands, shown = deque[Any](), time.monotonic()
        while True:
            while connection.poll(0 if core.busy or commands else None):
                commands.append(json.loads(connection.recv_bytes()))
                if commands[-1]["kind"] == "close":
                    return 0
            while commands and not (core.busy and _needs_idle_engine(commands[0])):
                _execute(core, commands.popleft(), send)
            for completion in core.step():
                send("finished", **completion)
            if time.monotonic() - shown > _ALIVE_SECONDS:
                shown = time.monotonic()
                send("alive")
    except EOFError:
        return 0
    except Exception as error:
        send("fatal", message=f"{type(error).__name__}: {error}")
        raise


def _needs_idle_engine(message: dict[str, Any]) -> bool:
    return message["kind"] in _NEED_IDLE_ENGINE and not message.get("in_flight")


def _execute(core: Any, message: dict[str, Any], send: Any) -> None:
    """Execute one command; send its error to the trainer and keep the engine running."""
    kind, reply = message["kind"], {}
    ids = [request["id"] for request in message["requests"]] if kind == "add" else [message["id"]]
    try:
        if kind == "add":
            core.add(message["requests"])
            return  # each completion is an answer
        if kind == "images":
            core.keep_images(message["new"], message["dropped"])
        elif kind == "load":
            if message.get("cut"):
                for completion in core.cut():
                    send("finished", **completion)
            core.load(message["weights"], message["version"])
        elif kind == "open_buffers":
            core.open_buffers(message["buffers"])
        elif kind == "load_part":
            core.load_part(message["layout"], message["is_first"])
        elif kind == "finish_parts":
            core.finish_parts(message["version"])
        elif kind == "swap":
            core.swap(message["adapter"], message["version"])
        elif kind == "sleep":
            core.sleep()
        elif kind == "adapter_sums":
            reply["sums"] = core.adapter_sums()
        elif kind == "trace":
            reply["lost"] = core.first_lost(message["weights"])
        send("reply", id=message["id"], **reply)
    except Exception as error:
        for identity in ids:
            send("error", id=identity, message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Skip the regular shutdown of Python, which takes seconds with vLLM.
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
