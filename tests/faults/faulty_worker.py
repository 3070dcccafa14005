"""The engine's worker with faults: ``python -m tests.faults.faulty_worker <descriptor>``.

Some of its messages are nonsense, come late, or never come. The file ``faults`` of the working directory lists the
faults, at most $MOST_FAULTS.
"""

import json
import os
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_rlhf.rollout.vllm import worker

FAULTS = Path("faults")
SENDABLE = ("finished", "reply", "alive")
KINDS = ("nonsense", "slow", "nonsense", "hang", "nonsense")


def nonsense(message, draw):
    """Return the bytes of a message that no worker sends."""
    if message["kind"] != "finished":
        return draw.choice([b"\xff\x00", b"[]", b"{}"])
    lost = draw.choice(["token_ids", "logprobs", "finish_reason", "policy_version", "id"])
    changes = [
        {"token_ids": message["token_ids"][1:]},
        {"token_ids": [10**9] * len(message["token_ids"])},
        {"token_ids": None},
        {"token_ids": [5] * 99, "logprobs": [-1.0] * 99},
        {"logprobs": [0.5] * len(message["logprobs"])},
    ]
    wrong = [{name: value for name, value in message.items() if name != lost}, *({**message, **c} for c in changes)]
    return json.dumps(draw.choice(wrong)).encode()


class FaultyConnection(Connection):
    """Sends some messages with a fault; none after nonsense, for which the process is ended."""

    is_valid = True

    def send_bytes(self, content):
        message = json.loads(content)
        before = FAULTS.read_text().split() if FAULTS.exists() else []
        draw = random.Random(f"{len(before)} {message.get('id')} {os.getpid()}")
        may_fail = message["kind"] in SENDABLE and self.is_valid and len(before) < int(os.environ["MOST_FAULTS"])
        if not may_fail or draw.random() > 0.05:
            super().send_bytes(content)
            return
        fault = KINDS[len(before) % len(KINDS)]
        with FAULTS.open("a") as file:
            file.write(f"{fault}\n")
        if fault == "nonsense":
            self.is_valid = False
            super().send_bytes(nonsense(message, draw))
        else:
            time.sleep(3 if fault == "slow" else 3600)
            super().send_bytes(content)


if __name__ == "__main__":
    worker.Connection = FaultyConnection
    status = worker.main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
