"""The protocol of rollout engines, which generate responses."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.types import Completion, SamplingParams

OnFinished = Callable[[int, Completion], None]  # called with the index of a prompt and its completion
Serve = Callable[["RolloutEngine", list[Any], OnFinished | None], list[Completion]]  # see RolloutEngine.serve


class EngineDied(RunError):
    """Error for an engine that has ended; the message contains the cause and the path of its log."""


class Generation:
    """Completions that an engine generates while its caller continues.

    Args:
        wait: function that waits for the completions and returns them in the order of the prompts; called once.
        source: generation that this one is made of, whose times are then those of this one; None without one.
    """

    def __init__(self, wait: Callable[[], list[Completion]], source: Generation | None = None) -> None:
        self._wait: Callable[[], list[Completion]] | None = wait
        self._source = source
        self._completions: list[Completion] = []
        self._finished_at: float | None = None
        self.requested_at: float = time.perf_counter() if source is None else source.requested_at

    @property
    def finished_at(self) -> float | None:
        """Time of the last completion, as of ``time.perf_counter()``; None if it is not finished, or not known."""
        known = self._finished_at if self._source is None else self._source.finished_at
        return known or self._finished_at

    def finish(self) -> None:
        """Set the time of the last completion, if it is not set."""
        self._finished_at = self._finished_at or time.perf_counter()

    def completions(self) -> list[Completion]:
        """Wait for the completions and return them.

        Raises:
            EngineDied: the engine has ended.
        """
        if self._wait is not None:
            self._completions = self._wait()
            self._wait = None
            self.finish()
        return self._completions


def _start_daemon(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="generation", daemon=True).start()


def in_thread(
    generate: Callable[[], list[Completion]], start: Callable[[Callable[[], None]], None] = _start_daemon
) -> Generation:
    """Call a function in another thread; return the generation with its completions.

    Args:
        generate: function that generates the completions.
        start: function that calls another one in a thread; by default in a new daemon thread.
    """
    future: Future[list[Completion]] = Future()

    def run() -> None:
        try:
            completions = generate()
        except BaseException as error:  # raised again where the completions are read
            future.set_exception(error)
        else:
            generation.finish()
            future.set_result(completions)

    generation = Generation(future.result)
    start(run)
    return generation


@dataclass(frozen=True)
class EngineSetup:
    """Settings that every engine needs to start.

    Args:
        model: directory with the actor's ``config.json``; the weights are pushed later.
        dtype: dtype of the engine's weights, ``float32`` or ``bfloat16``, from :func:`engine_dtype`.
        max_tokens: longest prompt and response together, in tokens.
        log: file for the engine's output.
        devices: GPUs for this engine, from :func:`visible_gpu`; empty lets the engine choose.
        lora: the actor's adapters, for engines with ``swaps_adapters``.
        threads: number of CPU threads for an engine that computes on CPUs in a separate process, at least 1.
    """

    model: Path
    dtype: str
    max_tokens: int
    log: Path
    devices: tuple[str, ...] = ()
    lora: LoRA | None = None
    threads: int = 1


def divided_threads(available: int, take_turns: bool) -> tuple[int, int]:
    """Return the numbers of threads of the trainer and of an engine on its cores.

    Args:
        available: number of threads of the trainer without an engine.
        take_turns: whether one of them waits while the other computes, so that each can use all cores.
    """
    if take_turns or available == 1:
        return available, available
    return available - available // 2, available // 2


def visible_gpu(device: torch.device) -> tuple[str, ...]:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` with which a child process uses this device; empty for a CPU.

    Args:
        device: a device as numbered in this process.
    """
    if device.type != "cuda":
        return ()
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (visible.split(",")[index].strip() if visible else str(index),)


def engine_dtype(precision: str, source_dtype: str) -> Literal["float32", "bfloat16"]:
    """Return the dtype of an engine's weights, which is that in which the actor computes.

    Args:
        precision: precision of the Trainer, ``32-true`` or ``bf16-mixed``.
        source_dtype: dtype of the actor's source, ``float32`` or ``bfloat16``.
    """
    return "bfloat16" if source_dtype == "bfloat16" or precision == "bf16-mixed" else "float32"


def reserved_gpu_bytes(total: int) -> int:
    """Return the bytes of a GPU that trainer and engine leave free, for CUDA contexts, NCCL and CUDA graphs.

    Neither counts these in its share. A context takes about 0.5 GiB, NCCL 0.5 to 2 GiB: an allowance, not measured.

    Args:
        total: bytes of the GPU.
    """
    return min(3 << 30, total // 16)


def limit_gpu_memory(device: torch.device, engine_share: float) -> None:
    """Free cached GPU memory, and limit this process to the part that the engine on the same GPU does not use.

    Without the limit, the trainer could use memory that vLLM has not allocated yet, so that the engine runs out of
    memory instead of the trainer. :func:`reserved_gpu_bytes` are kept free.

    Args:
        device: device of the trainer; a CPU is ignored.
        engine_share: fraction of the GPU's memory that the engine uses, in [0, 1]; 0 removes the limit.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        reserved = reserved_gpu_bytes(total) / total if engine_share else 0.0
        torch.cuda.set_per_process_memory_fraction(max(0.0, 1.0 - engine_share - reserved), device)


class RolloutEngine(ABC):
    """Interface of engines, which generate responses as token ids with their log-probabilities.

    On a CPU the same weights, prompts, sampling parameters and seeds give the same completions, independent of the
    order of the requests and of earlier requests. On a GPU, kernels round differently for different batch sizes, so
    completions may differ, but their distribution is the same.
    """

    @property
    def ranks(self) -> int:
        """Number of consecutive ranks that share the engine; all call every method but ``close``, in the same order.

        Identical requests of several of these ranks are generated once, and all of them get the completions.
        """
        return 1

    @property
    def swaps_adapters(self) -> bool:
        """Whether the base weights are pushed once, and then only LoRA adapters."""
        return False

    @property
    def gpu_share(self) -> float:
        """Fraction of the memory of each of its GPUs that the engine reserves; 0 if it has no fixed fraction."""
        return 0.0

    @property
    def sleeps(self) -> bool:
        """Whether :meth:`sleep` frees GPU memory; the weights are then lost, and the next push must contain all."""
        return False

    def sleep(self) -> None:  # noqa: B027 (most engines keep their memory)
        """Free the GPU memory of weights and cache; the next :meth:`update_weights` allocates it again.

        All ranks of the engine call this between rollouts, when no request is running.
        """

    def matrix_dtype(self, dtype: str) -> str:
        """Return the dtype that the engine casts pushed matrices to.

        Args:
            dtype: dtype of the setup.
        """
        return dtype

    @property
    def overlaps(self) -> bool:
        """Whether the engine generates while the trainer computes; otherwise :meth:`submit` generates at once."""
        return False

    @property
    def shares_cores(self) -> bool:
        """Whether the engine's process computes on the trainer's CPU cores, with the threads of the setup."""
        return False

    @property
    def needs_idle_push(self) -> bool:
        """Whether weights can be pushed only while no response is generated, so that ``max_staleness`` must be 0."""
        return False

    @property
    def mixes_versions(self) -> bool:
        """Whether weights are loaded while responses are generated, so that their tokens have several versions."""
        return False

    def check(self, sampling: SamplingParams) -> None:  # noqa: B027 (most engines support all parameters)
        """Validate the sampling parameters before the engine starts.

        Args:
            sampling: sampling parameters of later requests.

        Raises:
            ValueError: the engine does not support them.
        """

    @abstractmethod
    def start(self, setup: EngineSetup) -> None:
        """Start the engine; may return before it is ready."""

    @abstractmethod
    def wait(self) -> str:
        """Block until the engine is ready; return a short description of it.

        Raises:
            EngineDied: the engine could not start.
        """

    @abstractmethod
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; later completions have this ``policy_version``.

        Args:
            parameters: (transformers name, tensor); each tensor is valid only until the next one.
            version: version of the policy.

        Raises:
            EngineDied: the engine has ended.
        """

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the adapters; only for engines with ``swaps_adapters``.

        Args:
            parameters: (name in the actor, tensor); each tensor is valid only until the next one.
            version: version of the policy.

        Raises:
            EngineDied: the engine has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} takes merged weights only, not adapters")

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in the order of the prompts.

        Args:
            prompts: token ids.
            sampling: sampling parameters.
            seeds: one per prompt, in [0, 2**63).
            on_finished: callback with the index of a prompt and its completion, called in this thread as soon as a
                completion is finished; engines without early results need not call it.

        Raises:
            EngineDied: the engine has ended.
        """

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> Generation:
        """Start to generate one completion per prompt with the weights of the last push.

        Later pushes do not change these completions, unless the engine ``mixes_versions``. Ranks that share the engine
        must wait for their generations in the same order.

        Args:
            prompts: token ids.
            sampling: sampling parameters.
            seeds: one per prompt, in [0, 2**63).
            on_finished: callback as for :meth:`generate`, but possibly called in another thread; all calls have
                returned when :meth:`Generation.completions` returns.
        """
        completions = self.generate(prompts, sampling, seeds, on_finished)
        generation = Generation(lambda: completions)
        generation.completions()
        return generation

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Start to generate one completion per prompt; requests of several calls are generated at the same time.

        Not collective: only the first of the ranks that share an engine calls this, in a function that it passes to
        :meth:`serve`. Engines without ``overlaps`` generate at once.

        Args:
            prompts: token ids.
            sampling: sampling parameters of each prompt, which may differ in ``max_tokens`` only.
            seeds: one per prompt, in [0, 2**63).

        Returns:
            Futures of the completions, which raise :class:`EngineDied` if the engine has ended.
        """
        longest = max(own.max_tokens for own in sampling)
        completions = self.generate(prompts, replace(sampling[0], max_tokens=longest), seeds)
        futures = [Future[Completion]() for _ in completions]
        for future, completion, own in zip(futures, completions, sampling, strict=True):
            future.set_result(completion.cut(own.max_tokens))
        return futures

    def serve(self, requests: Sequence[Any], handle: Serve, on_finished: OnFinished | None = None) -> Generation:
        """Generate one completion for each request with a function of the caller, which calls :meth:`request`.

        The function runs in a thread, on the first of the ranks that share the engine, for the requests of all of them.

        Args:
            requests: requests of this rank, which can be pickled and compared.
            handle: function of the engine, requests and ``on_finished`` that returns the completions.
            on_finished: callback as for :meth:`submit`.
        """
        return in_thread(lambda: handle(self, list(requests), on_finished))

    @abstractmethod
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter whose value differs in the engine; None if no difference is known."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and its processes; may be called twice."""


@dataclass(frozen=True)
class CompletionCheck:
    """Validation of the completions of one call of :meth:`RolloutEngine.generate`.

    Args:
        max_tokens: largest number of tokens in a response.
        version: version of the policy that was pushed last before the request.
        vocabulary: V, number of tokens of the actor.
        allows_newer: whether tokens of later versions are valid, as from an engine that ``mixes_versions``.
    """

    max_tokens: int
    version: int
    vocabulary: int
    allows_newer: bool = False

    def check_one(self, completion: Completion) -> None:
        """Validate one completion.

        Raises:
            RuntimeError: the completion is too long, from another policy version, or has a token unknown to the actor.
        """
        ids = completion.token_ids
        versions = {completion.policy_version, *(version for _, version in completion.later_versions)}
        if min(versions) < self.version or (max(versions) > self.version and not self.allows_newer):
            raise RunError(
                f"the engine returned a completion of policy version {completion.policy_version}, but the last pushed "
                f"version is {self.version}: its weights are not the actor's"
            )
        if len(ids) > self.max_tokens:
            raise RunError(f"the engine returned {len(ids)} tokens where at most {self.max_tokens} were requested")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            raise RunError(f"the engine returned token {wrong}; the actor has tokens 0 to {self.vocabulary - 1}")

    def check_all(self, completions: Sequence[Completion], prompts: int) -> None:
        """Validate the completions of all prompts.

        Args:
            completions: completions of the engine.
            prompts: number of requests.

        Raises:
            RuntimeError: a completion is missing or invalid.
        """
        if len(completions) != prompts:
            raise RunError(f"the engine returned {len(completions)} completions for {prompts} prompts")
        for completion in completions:
            self.check_one(completion)

    def before(self, on_finished: OnFinished | None) -> OnFinished | None:
        """Return a callback that validates a completion and then calls ``on_finished``, if that is set."""
        if on_finished is None:
            return None

        def check_and_call(index: int, completion: Completion) -> None:
            self.check_one(completion)
            on_finished(index, completion)

        return check_and_call
