"""The interface of rollout engines, which generate responses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import ImageProcessor
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.types import NO_LIMITS, Completion, SamplingLimits, SamplingParams, TokenPrompt


@dataclass(frozen=True)
class EngineTraits:
    """Tells a run what an engine can do, and what it needs.

    Args:
        ranks: consecutive ranks that share the engine. All of them call every method but ``request`` and ``close``, in
            the same order. Identical requests of several of these ranks are generated once.
        push_ranks: consecutive ranks of which the first reads the parameters of a push. The others exhaust them without
            reading any, because theirs may be without values. 1: all ranks read them.
        overlaps: whether the engine generates while the trainer computes. Otherwise ``request`` generates at once.
        mixes_versions: whether weights are loaded while responses are generated, so that their tokens come from several
            versions.
        needs_idle_push: whether weights can be pushed only while no response is generated. ``max_staleness`` must then
            be 0.
        swaps_adapters: whether the base weights are pushed once, and then only LoRA adapters.
        matrix_dtype: dtype that the engine casts pushed matrices to. None takes the dtype of its setup.
        shares_cores: whether the engine's process computes on the trainer's CPU cores, with the threads of the setup.
        gpu_fraction: fraction of the memory of each of its GPUs that the engine reserves. 0 for an engine without GPU.
        sleeps: whether ``sleep`` frees GPU memory. The weights are then lost, and the next push must contain all.
        reads_images: whether the engine reads the images of prompts.
        restarts: whether the engine starts again after a failure. If weights were pushed meanwhile, responses that it
            generates again may come from newer weights than were requested.
    """

    ranks: int = 1
    push_ranks: int = 1
    overlaps: bool = False
    mixes_versions: bool = False
    needs_idle_push: bool = False
    swaps_adapters: bool = False
    matrix_dtype: str | None = None
    shares_cores: bool = False
    gpu_fraction: float = 0.0
    sleeps: bool = False
    reads_images: bool = False
    restarts: bool = False


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
        processor: processor of the images of prompts; None if prompts have none.
        images_per_prompt: largest number of images of a prompt.
        limits: limits of the training responses.
    """

    model: Path
    dtype: str
    max_tokens: int
    log: Path
    devices: tuple[str, ...] = ()
    lora: LoRA | None = None
    threads: int = 1
    processor: ImageProcessor | None = None
    images_per_prompt: int = 0
    limits: SamplingLimits = NO_LIMITS


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


def engine_dtype(precision: str, source_dtype: str | None) -> Literal["float32", "bfloat16"]:
    """Return the dtype of an engine's weights, which is that in which the actor computes.

    Args:
        precision: precision of the Trainer, ``32-true`` or ``bf16-mixed``.
        source_dtype: dtype of the actor's source; None is float32.
    """
    return "bfloat16" if source_dtype == "bfloat16" or precision == "bf16-mixed" else "float32"


class RolloutEngine(ABC):
    """Interface of engines, which generate responses as token ids with their log-probabilities.

    To write your own engine, implement at least :meth:`start`, :meth:`wait`, :meth:`update_weights` and
    :meth:`request`. The functions of :mod:`lightning_rlhf.rollout.generation` call it.

    On a CPU the same weights, prompts, sampling parameters and seeds give you the same completions, independent of the
    order of the requests and of earlier requests. On a GPU, and on a CPU with AVX-512, kernels round differently for
    different batch sizes, so completions may differ, but their distribution is the same.
    """

    serves_several_ranks = False  # whether an engine of this class can be shared by ranks by itself
    proven_gap: float | None = None  # mean gap of log-probs, nats, when a run last proved the transfer of weights
    group: RankGroup | None = None  # the ranks that share the engine, from start() on; None for one rank

    @property
    def source(self) -> str:
        """Where to look if the engine takes long, as the end of a log line."""
        return ""

    @property
    def traits(self) -> EngineTraits:
        """Properties of the engine that a run depends on."""
        return EngineTraits()

    @property
    def restarted(self) -> int:
        """How often the engine was started again after a failure."""
        return 0

    def check(self, sampling: SamplingParams) -> None:  # noqa: B027 (most engines support all parameters)
        """Validate the sampling parameters before the engine starts.

        Args:
            sampling: parameters of later requests.

        Raises:
            ValueError: the engine does not support them.
        """

    def return_experts(self) -> None:
        """Let completions contain the experts that a mixture of experts chose. Called before the engine starts.

        Raises:
            ValueError: the engine cannot.
        """
        raise UsageError(
            f"{type(self).__name__} does not return the experts that it chose: use VLLMEngine or TransformersEngine"
        )

    @abstractmethod
    def start(self, setup: EngineSetup) -> None:
        """Start the engine. It may return before the engine is ready."""

    @abstractmethod
    def wait(self) -> str:
        """Block until the engine is ready, and return a short description of it.

        Raises:
            EngineDied: the engine could not start.
        """

    @abstractmethod
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. Later completions get this ``policy_version``.

        Args:
            parameters: (transformers name, tensor). Each tensor is valid only until the next one.
            version: version of the policy.

        Raises:
            EngineDied: the engine has ended.
        """

    @abstractmethod
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Start to generate one completion per prompt. Requests of several calls are generated at the same time.

        This is not collective. If several ranks share the engine, only the first of them calls it. An engine that does
        not overlap generates at once.

        Args:
            prompts: sequences of token ids, with images if the engine ``reads_images`` and the data contain some.
            sampling: sampling parameters of each prompt. They may differ only in ``max_tokens``.
            seeds: one per prompt, in [0, 2**63).

        Returns:
            Futures of the completions, which raise :class:`EngineDied` if the engine has ended.
        """

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the adapters. Only engines that swap adapters need it.

        Args:
            parameters: (name in the actor, tensor). Each tensor is valid only until the next one.
            version: version of the policy.

        Raises:
            EngineDied: the engine has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} takes merged weights only, not adapters")

    def training_sampler(self, sampler: Any) -> Any:
        """Return the :class:`~.sampler.Sampler` of training steps, usually the given one, which validations use."""
        return sampler

    def sleep(self) -> None:  # noqa: B027 (most engines keep their memory)
        """Free the GPU memory of weights and cache. The next :meth:`update_weights` allocates it again.

        All ranks of the engine call this between rollouts, when no request is running.
        """

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs in the engine, or None if no difference is known."""
        return None

    def close(self) -> None:  # noqa: B027 (an engine in the trainer's process ends with it)
        """End the engine and its processes. You may call it twice."""


def finished(completions: Iterable[Completion]) -> list[Future[Completion]]:
    """Return futures of completions that are known already, for engines that generate at once."""
    futures = []
    for completion in completions:
        future: Future[Completion] = Future()
        future.set_result(completion)
        futures.append(future)
    return futures
