"""vLLM with LoRA adapters swapped in it: a push sends the adapters alone, not the model that they change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.models.lora import LoRA, save_adapter
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.vllm_engine import VLLMEngine

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM 0.32 makes room


class VLLMAdapterEngine(VLLMEngine):
    """:class:`~lightning_rlhf.rollout.vllm_engine.VLLMEngine` that is sent the actor's weights once, then adapters.

    A push takes the adapters' bytes instead of the model's, and vLLM computes ``W x + (alpha / rank) B A x`` as the
    actor does, so that adapters smaller than what bfloat16 tells apart in W are not lost; in exchange each token costs
    it more. The adapters go through a file in the engine's directory: vLLM's own way to replace them.

    Args:
        gpu_memory_utilization: see :class:`~lightning_rlhf.rollout.vllm_engine.VLLMEngine`.
        tensor_parallel_size: see there.
        cpu_threads: see there.
        arguments: see there.
        deterministic: see there.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        tensor_parallel_size: int = 1,
        cpu_threads: int = 1,
        arguments: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(gpu_memory_utilization, tensor_parallel_size, cpu_threads, arguments, deterministic)
        self._sent: dict[str, Tensor] = {}

    @property
    def swaps_adapters(self) -> bool:
        """See :meth:`RolloutEngine.swaps_adapters`."""
        return True

    def start(self, setup: EngineSetup) -> None:
        """Start the process and return at once.

        Raises:
            ValueError: the actor has no adapters, or larger ones than vLLM takes.
        """
        self._lora, self._directory = _of(setup), setup.model / "adapter"
        super().start(setup)

    def llm_arguments(self, setup: EngineSetup) -> dict[str, Any]:
        """What ``vllm.LLM`` is given."""
        room = next(rank for rank in _RANKS if rank >= _of(setup).rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **super().llm_arguments(setup)}

    def update_adapters(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_adapters`."""
        self._sent = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters}
        save_adapter(self._lora, self._sent, self._directory)
        swapping = self._running.command("swap", adapter=str(self._directory), version=version)
        self._running.answers([swapping], "the engine to take new adapters")

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`; of adapters."""
        sent = dict(self._sent)
        for name, tensor in parameters:
            if name not in sent or not torch.equal(sent.pop(name), tensor.cpu()):
                return name
        return next(iter(sent), None)


def _of(setup: EngineSetup) -> LoRA:
    if setup.lora is None:
        raise ValueError(
            "VLLMAdapterEngine sends LoRA adapters, and the actor has none: give its source a lora, or take VLLMEngine"
        )
    if setup.lora.rank > _RANKS[-1]:
        raise ValueError(
            f"vLLM takes adapters up to rank {_RANKS[-1]}, the actor's have {setup.lora.rank}: take VLLMEngine, which "
            f"is sent merged weights"
        )
    return setup.lora
