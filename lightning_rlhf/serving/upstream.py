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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import torch

from lightning_rlhf.launch_environment import engine_environment
from lightning_rlhf.models.kv_cache import BLOCK_TOKENS
from lightning_rlhf.serving import keeper

_CLOSE_SECONDS = 15.0
_CPU_BATCH_TOKENS = 4096
_TMPDIR_CHARACTERS = 56  # the kernel takes 107 of a socket's path; our folder has 14 and vLLM's names in it 37
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
        cpu_cache_bytes: size of the cache of keys and values without a GPU.
    """

    model: str
    name: str
    dtype: str
    max_model_len: int
    max_tokens: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 28

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
                "block-size": BLOCK_TOKENS,
                "kv-cache-memory-bytes": self.cpu_cache_bytes,
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

    Raises:
        ValueError: its sockets or its log cannot be where they would be.
    """

    def __init__(self, served: Served | Sequence[str], log: Path, secrets: Collection[str] = ()) -> None:
        if len(tempfile.gettempdir()) > _TMPDIR_CHARACTERS:
            raise ValueError(f"{tempfile.gettempdir()} is too long a path for sockets: set TMPDIR to a shorter one")
        output = _opened(log)
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-"))  # 0700
        self.socket, self.log = self._folder / "s", log
        command = served.command(self.socket) if isinstance(served, Served) else served
        inherited = {name: value for name, value in os.environ.items() if name not in secrets}
        environment = {**inherited, **engine_environment(inherited, torch.cuda.is_available())}
        for name in _NOT_FOR_VLLM:
            environment.pop(name, None)
        environment["VLLM_RPC_BASE_PATH"] = str(self._folder)  # or the engine's sockets lie where all may look
        with output:
            self._process = subprocess.Popen(
                [sys.executable, keeper.__file__, str(self._folder), *command],
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
        if self._process.stdin.closed:
            return
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        with suppress(ProcessLookupError):  # it is gone, unless the keeper hangs or was killed
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def client_of(socket: Path) -> httpx.AsyncClient:
    """What asks a server on a socket, each time by a new connection.

    An idle one may be closed by the server in the moment in which it is used again, and takes the request with it.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
    return httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)


def _opened(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb")
    except OSError as error:
        raise ValueError(f"cannot write the log {log}: {error.strerror}; choose another by --log") from error
