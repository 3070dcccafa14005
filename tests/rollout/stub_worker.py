"""The real worker with a fake vLLM: ``python -m tests.rollout.stub_worker <descriptor>``.

The fake answers a request with its prompt after as many steps as the prompt has tokens. The log-probabilities are the
negative of the first pushed weight, -1 if none is pushed.
"""

import os
import subprocess
import sys
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import numpy as np

BABBLE = {-1: b"\xff", -2: b"[]", -3: b'{"id": "0"}'}


class StubCore:
    def __init__(self, arguments):
        if "chatter" in arguments:
            print(arguments["chatter"], flush=True)
        starts = Path(arguments.get("starts", os.devnull))  # a character for each start
        with starts.open("a") as file:
            file.write("x")
        if "refuse" in arguments and len(starts.read_text()) <= arguments.get("refused", 1):
            raise ValueError(arguments["refuse"])
        if "child" in arguments:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(arguments["child"]).write_text(str(child.pid))
        time.sleep(arguments.get("slow", 0))
        if "exit" in arguments:
            os._exit(arguments["exit"])
        if "kill" in arguments:
            os.kill(os.getpid(), arguments["kill"])
        self.weight = 1.0
        self.running, self.version, self.deaf = {}, -1, arguments.get("deaf", False)

    facts: ClassVar = {"blocks": 7, "block_size": 32, "runner": "V1", "scheduling": "synchronous"}

    @property
    def busy(self):
        while self.deaf:
            time.sleep(1)
        return bool(self.running)

    def load(self, weights, version):
        if weights is None:
            raise TypeError("no weights")
        time.sleep(weights.get("seconds", 0))
        if "path" in weights:
            self.weight = np.fromfile(weights["path"], np.float32, 1).item()
        self.version = version

    def sleep(self):
        self.version = None

    def add(self, requests):
        if any(not request["prompt"] for request in requests):
            raise ValueError("an empty prompt")
        for request in requests:
            self.running[request["id"]] = [len(request["prompt"]), request["prompt"]]

    def step(self):
        time.sleep(0.01)
        for identity, (left, prompt) in list(self.running.items()):
            if prompt == [666]:
                raise FloatingPointError("the engine burnt down")
            if prompt[0] < 0:
                Connection(os.dup(int(sys.argv[1]))).send_bytes(BABBLE[prompt[0]])
            self.running[identity][0] -= 1
            if left == 1:
                del self.running[identity]
                yield {
                    "id": identity,
                    "token_ids": prompt,
                    "logprobs": [-self.weight] * len(prompt),
                    "finish_reason": "stop",
                    "policy_version": self.version,
                }


if __name__ == "__main__":
    from lightning_rlhf.rollout.vllm import worker

    sys.modules["vllm"] = types.SimpleNamespace(__version__="0")
    sys.modules["lightning_rlhf.rollout.vllm.core"] = types.SimpleNamespace(VLLMCore=StubCore)
    code = worker.main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)
