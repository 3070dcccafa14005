"""What generates responses: the protocol every engine keeps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
        dtype: of the weights, ``float32`` or ``bfloat16``.
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


class RolloutEngine(ABC):
    """Token ids in, token ids and log-probabilities out.

    The same weights, prompts, sampling and seeds give the same completions, whatever the order of the requests and
    whatever the engine did before.
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
