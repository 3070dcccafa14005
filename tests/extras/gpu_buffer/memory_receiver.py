"""vLLM's worker extension with host memory instead of buffers on GPUs."""

import os
from pathlib import Path

from lightning_rlhf.rollout.vllm.receiver import WeightReceiver
from lightning_rlhf.rollout.vllm.sync import map_memory


class MemoryReceiver(WeightReceiver):
    """Maps the memory of the rank with this worker's number.

    The file $BUFFER_FAULT contains the method that fails or exits.
    """

    def map_buffer(self, messages):
        if _fault() == "map":
            raise RuntimeError("CUDA error: invalid device context")
        (message,) = (message for message in messages if message["gpu"] == self.rank)
        memory = map_memory(message["path"], message["nbytes"])
        return memory + 1 if _fault() == "bytes" else memory

    def load_part(self, layout, is_first):
        if _fault() == "load" and not is_first:
            raise RuntimeError("out of memory")
        if _fault() == "death" and not is_first:
            os._exit(3)
        super().load_part(layout, is_first)


def _fault():
    return Path(os.environ["BUFFER_FAULT"]).read_text()
