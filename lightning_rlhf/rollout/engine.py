"""What generates responses: the protocol every engine keeps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.types import Completion, SamplingParams

Finished = Callable[[int, Completion], None]  # is told of the completion of a prompt, by the prompt's number


class EngineDied(RuntimeError):
    """The engine is gone; the message says how it ended and where its log lies."""


@dataclass(frozen=True)
class EngineSetup:
    """What every engine must know to start.

    Args:
        model: directory with the actor's ``config.json``; the weights are pushed later.
        dtype: of the engine's weights, ``float32`` or ``bfloat16``, from :func:`engine_dtype`.
        max_tokens: longest prompt with response, in tokens.
        log: file that the engine's own output goes to.
        devices: GPUs for this engine, from :func:`gpus`; empty leaves the choice to the engine.
        lora: the actor's adapters, for engines that take them by themselves.
    """

    model: Path
    dtype: str
    max_tokens: int
    log: Path
    devices: tuple[str, ...] = ()
    lora: LoRA | None = None


def gpus(device: torch.device) -> tuple[str, ...]:
    """What a child process must have as ``CUDA_VISIBLE_DEVICES`` to see this device; empty for a CPU.

    Args:
        device: as this process counts its devices.
    """
    if device.type != "cuda":
        return ()
    number = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (visible.split(",")[number].strip() if visible else str(number),)


def engine_dtype(precision: str, source_dtype: str) -> Literal["float32", "bfloat16"]:
    """Return the dtype of an engine's weights: the one that the actor computes in.

    Args:
        precision: precision of the Trainer, ``32-true`` or ``bf16-mixed``.
        source_dtype: dtype of the actor's source, ``float32`` or ``bfloat16``.
    """
    return "bfloat16" if source_dtype == "bfloat16" or precision == "bf16-mixed" else "float32"


def limit_gpu_memory(device: torch.device, engine_share: float) -> None:
    """Give cached memory back to a GPU, and limit this process to the part that the engine on it does not use.

    Without the limit a trainer that grows takes memory that vLLM counts on but has not allocated yet, and the engine
    runs out of memory instead of the trainer.

    Args:
        device: device of the trainer; a CPU is left alone.
        engine_share: fraction of the GPU's memory that the engine uses, in [0, 1]; 0 removes the limit.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0 - engine_share, device)


class RolloutEngine(ABC):
    """Token ids in, token ids and log-probabilities out.

    On a CPU the same weights, prompts, sampling and seeds give the same completions, whatever the order of the requests
    and whatever the engine did before. On a GPU they give samples of the same distribution: kernels round differently
    in batches of another size, and a sample can change with the last bit of a logit.
    """

    @property
    def ranks(self) -> int:
        """Consecutive ranks that ask together: each calls every method but ``close`` as often as the others do.

        What several of them ask in the same words is generated once, and all of them get it.
        """
        return 1

    @property
    def swaps_adapters(self) -> bool:
        """Whether LoRA adapters are sent by themselves, after the weights that they change, which are sent once."""
        return False

    @property
    def gpu_share(self) -> float:
        """Fraction of the memory of each of its GPUs that the engine reserves; 0 if it has no fixed fraction."""
        return 0.0

    @property
    def sleeps(self) -> bool:
        """Whether :meth:`sleep` frees GPU memory; the weights are then lost, and the next push must be a whole one."""
        return False

    def sleep(self) -> None:  # noqa: B027 (most engines keep their memory)
        """Free the GPU memory of weights and cache until the next :meth:`update_weights`, which allocates it again.

        Called between rollouts, when no request is running, by all ranks of the engine.
        """

    def check(self, sampling: SamplingParams) -> None:  # noqa: B027 (most can draw anything)
        """Refuse, before anything is started, what the engine cannot draw.

        Args:
            sampling: that will be asked for.

        Raises:
            ValueError: the engine cannot do it.
        """

    @abstractmethod
    def start(self, setup: EngineSetup) -> None:
        """Begin to start; may return before the engine is ready."""

    @abstractmethod
    def wait(self) -> str:
        """Block until ready; describe the engine in a few words.

        Raises:
            EngineDied: it could not start.
        """

    @abstractmethod
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; what is generated from now on carries the version.

        Args:
            parameters: (transformers name, tensor), each valid only until the next.
            version: of the policy.

        Raises:
            EngineDied: the engine is gone.
        """

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the adapters; only of engines that swap them.

        Args:
            parameters: (name in the actor, tensor), each valid only until the next.
            version: of the policy.

        Raises:
            EngineDied: the engine is gone.
        """
        raise NotImplementedError(f"{type(self).__name__} is sent merged weights")

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in their order.

        Args:
            prompts: token ids.
            sampling: how to draw.
            seeds: one per prompt, in [0, 2**63).
            finished: called, in this thread, with the number of a prompt and its completion as soon as that is there;
                an engine that cannot tell early need not call it.

        Raises:
            EngineDied: the engine is gone.
        """

    @abstractmethod
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Name of the first parameter whose value the engine does not have; None if none is known."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and everything it started; closing twice is fine."""
