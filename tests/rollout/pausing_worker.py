"""The engine's worker, which pauses after each step that finished a response while the file named by PAUSE exists."""

import os
import sys
import time
from pathlib import Path

from lightning_rlhf.rollout.vllm.core import VLLMCore
from lightning_rlhf.rollout.vllm.worker import main

LIMIT_SECONDS = 60
_step = VLLMCore.step


def step(core):
    finished = list(_step(core))
    yield from finished
    began = time.monotonic()
    while finished and Path(os.environ["PAUSE"]).exists():
        if time.monotonic() - began > LIMIT_SECONDS:
            raise TimeoutError("the finished responses were not read")
        time.sleep(0.01)


if __name__ == "__main__":
    VLLMCore.step = step
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
