"""Start and end of the server process from its parent."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.serve.limits import Limits
from lightning_rlhf.launch_environment import engine_environment
from lightning_rlhf.models.kv_cache import BLOCK_TOKENS
from lightning_rlhf.processes.child import Child, bytes_too_long

_CLOSE_SECONDS = 15.0
_CPU_BATCH_TOKENS = 4096
# Variables that open routes, allow code from requests, or add a second key.
_NOT_INHERITED = (
    "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
)  # fmt: skip


@dataclass(frozen=True)
class ServedModel:
    """A model and its settings in vLLM.

    Args:
        path: directory or hub id.
        name: name of the model in requests.
        dtype: dtype of the weights; ``auto`` is the dtype in the model's config on a GPU, and float32 on a CPU.
        max_model_len: maximum number of tokens of prompt and response together.
        max_tokens: maximum number of tokens of a response, also for requests without a limit.
        max_images: maximum number of images of a request; None for a model that reads texts only.
        tensor_parallel_size: number of GPUs that share the model.
        gpu_memory_utilization: fraction of each GPU's memory, in (0, 1].
        cpu_cache_bytes: size of the key-value cache on a CPU.
        adapters: directory of each LoRA adapter, by its name in requests.
        adapter_limits: number, largest rank and layers of the adapters, as vLLM's arguments.
    """

    path: str
    name: str
    dtype: str
    max_model_len: int
    max_tokens: int
    max_images: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 28
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_limits: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Return the command line of ``vllm serve``."""
        options: dict[str, object] = {
            "model": self.path,
            "served-model-name": self.name,
            "max-model-len": self.max_model_len,
            "load-format": "safetensors",
            "hf-overrides": json.dumps({"head_dtype": "float32"}),  # logits that are not rounded, as a run's are
            "generation-config": "vllm",  # requests do not inherit the model's sampling parameters
            "override-generation-config": json.dumps({"max_new_tokens": self.max_tokens}),
            "tensor-parallel-size": self.tensor_parallel_size,
        }
        if self.max_images is not None:
            options["limit-mm-per-prompt"] = json.dumps({"image": self.max_images})
        switches = ["disable-fastapi-docs", "no-enable-log-requests"]
        if torch.cuda.is_available():
            options |= {"dtype": self.dtype, "gpu-memory-utilization": self.gpu_memory_utilization}
        else:
            # Chunked prefill of a seeded request crashes the CPU engine (vLLM 0.32).
            options |= {
                "dtype": "float32" if self.dtype == "auto" else self.dtype,
                "block-size": BLOCK_TOKENS,
                "kv-cache-memory-bytes": self.cpu_cache_bytes,
                "max-num-batched-tokens": max(_CPU_BATCH_TOKENS, self.max_model_len),
            }
            switches += ["enforce-eager", "no-enable-chunked-prefill"]
        lists = {}
        if self.adapters:
            switches.append("enable-lora")
            lists["lora-modules"] = [f"{name}={path}" for name, path in self.adapters.items()]
            for name, value in self.adapter_limits.items():
                option = name.replace("_", "-")
                if isinstance(value, list):
                    lists[option] = value
                else:
                    options[option] = value
        return [
            *(f"--{name}={value}" for name, value in options.items()),
            *(f"--{switch}" for switch in switches),
            *(part for name, values in lists.items() for part in (f"--{name}", *values)),
        ]


class ServerProcess:
    """A process that runs :mod:`.server`; it ends, with its children, when this process ends.

    Args:
        model: model to serve.
        listening: socket that accepts the connections.
        key: API key.
        limits: limits of requests.
        log: file for the output.
        secrets: names of environment variables that the process does not inherit.

    Raises:
        ValueError: the folder for sockets or the log cannot be used.
    """

    def __init__(
        self,
        model: ServedModel,
        listening: socket.socket,
        *,
        key: str,
        limits: Limits,
        log: Path,
        secrets: Collection[str] = (),
        command: tuple[str, ...] = (sys.executable, "-m", "lightning_rlhf.extras.serve.server"),
    ) -> None:
        directory = tempfile.gettempdir()
        if (excess := bytes_too_long(f"{directory}/rlhf-12345678")) > 0:
            raise UsageError(
                f"the path {directory} is too long for sockets: set TMPDIR to a path of at most "
                f"{len(directory) - excess} characters"
            )
        self.log = log
        _check_writable(log)
        self.folder = Path(tempfile.mkdtemp(prefix="rlhf-"))  # mode 0700
        inherited = {name: value for name, value in os.environ.items() if name not in {*secrets, *_NOT_INHERITED}}
        environment = {**inherited, **engine_environment(inherited, torch.cuda.is_available())}
        for name in _NOT_INHERITED:
            environment.pop(name, None)
        environment["VLLM_RPC_BASE_PATH"] = str(self.folder)  # not in a folder that other users can read
        descriptors = [listening.fileno()]
        self.process = Child(command, environment, log=log, stdin=subprocess.PIPE, pass_fds=descriptors)
        settings = {
            "folder": str(self.folder),
            "descriptor": listening.fileno(),
            "arguments": model.arguments(),
            "key": key,
            "limits": asdict(limits),
        }
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; the caller checks ``alive``
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return self.process.log_tail()

    def close(self) -> None:
        """End the process and its children; may be called twice."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.end(_CLOSE_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


def _check_writable(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.open("wb").close()
    except OSError as error:
        raise UsageError(f"cannot write the log {log}: {error.strerror}; choose another with --log") from error
