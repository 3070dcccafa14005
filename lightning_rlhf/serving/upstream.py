"""vLLM's own server, on a socket in a folder that nobody else may enter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_rlhf.launch_environment import engine_environment
from lightning_rlhf.serving import keeper

_CLOSE_SECONDS = 15.0
_CPU_CACHE_BYTES = 1 << 28
_CPU_BATCH_TOKENS = 4096
_PATH_CHARACTERS = 100  # the kernel takes 107
_TAIL = 2000
# They open routes, run code, or ask for a key on a socket that is nobody else's.
_NOT_FOR_VLLM = (
    "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What is served.

    Args:
        model: directory or hub id.
        name: under which requests ask for it.
        dtype: of its weights; ``auto`` is the model's own with a GPU, and float32 without.
        max_model_len: longest prompt with response, in tokens.
        max_tokens: longest response, in tokens, also where a request does not say.
        tensor_parallel_size: GPUs that share it.
        gpu_memory_utilization: share of each GPU's memory, in (0, 1].
    """

    model: str
    name: str
    dtype: str
    max_model_len: int
    max_tokens: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9

    def command(self, socket: Path) -> list[str]:
        """What starts vLLM on a socket."""
        options: dict[str, object] = {
            "model": self.model,
            "served-model-name": self.name,
            "uds": socket,
            "max-model-len": self.max_model_len,
            "load-format": "safetensors",
            "generation-config": "vllm",  # a request means what it says
            "override-generation-config": json.dumps({"max_new_tokens": self.max_tokens}),
            "tensor-parallel-size": self.tensor_parallel_size,
        }
        switches = ["disable-fastapi-docs", "disable-uvicorn-access-log", "no-enable-log-requests"]
        if torch.cuda.is_available():
            options |= {"dtype": self.dtype, "gpu-memory-utilization": self.gpu_memory_utilization}
        else:
            # A seeded request whose prompt is prefilled in chunks kills the CPU engine (vLLM 0.32).
            options |= {
                "dtype": "float32" if self.dtype == "auto" else self.dtype,
                "block-size": 32,
                "kv-cache-memory-bytes": _CPU_CACHE_BYTES,
                "max-num-batched-tokens": max(_CPU_BATCH_TOKENS, self.max_model_len),
            }
            switches += ["enforce-eager", "no-enable-chunked-prefill"]
        given = [f"--{name}={value}" for name, value in options.items()]
        # The command ``vllm`` of the CPU build does not start.
        start = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
        return [*start, *given, *(f"--{switch}" for switch in switches)]


class Upstream:
    """A server of one's own that ends with this process, and with all that it started.

    Args:
        served: what it serves; or a command that starts something else.
        log: file for its output.
        secrets: variables of the environment that it does not get.
    """

    def __init__(self, served: Served | Sequence[str], log: Path, secrets: Collection[str] = ()) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-"))  # 0700
        self.socket, self.log = self._folder / "s", log
        if len(str(self.socket)) > _PATH_CHARACTERS:
            self._folder.rmdir()
            raise ValueError("the path of temporary files is too long for a socket: set TMPDIR to a shorter one")
        command = served.command(self.socket) if isinstance(served, Served) else served
        inherited = {name: value for name, value in os.environ.items() if name not in secrets}
        environment = {**inherited, **engine_environment(inherited, torch.cuda.is_available())}
        for name in _NOT_FOR_VLLM:
            environment.pop(name, None)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, keeper.__file__, *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of the terminal is for the front
            )

    @property
    def alive(self) -> bool:
        """Whether it runs, or starts."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-_TAIL:].strip()

    def close(self) -> None:
        """End it; closing twice is fine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
