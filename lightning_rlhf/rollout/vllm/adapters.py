"""Arguments of vLLM for LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.rollout.engine import EngineSetup

_MERGED = "use merged weights (VLLMEngine, or an export without adapter: true)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM 0.32 supports


def adapter_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for the actor's adapters.

    Only the layers that the actor adapts are wrapped. Without this list vLLM wraps the head too, which costs time at
    each token, and then fails to compute log-probs of prompts (vLLM 0.32).
    """
    return {"enable_lora": True, **layers_and_rank(str(setup.model), [lora_of(setup)])}


def layers_and_rank(path: str, adapters: Sequence[LoRA]) -> dict[str, Any]:
    """Return vLLM's limits for adapters of a model: their number, largest rank and layers.

    Args:
        path: directory or hub id of the model.
        adapters: settings of the adapters, at least one.

    Raises:
        ValueError: vLLM does not support their rank, or DoRA.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        model = language_model_class(config).from_config(config, trust_remote_code=False)
    for lora in adapters:
        check_supported(lora)
    largest = max(lora.rank for lora in adapters)
    return {
        "max_loras": len(adapters),
        "max_lora_rank": next(rank for rank in RANKS if rank >= largest),
        "lora_target_modules": sorted({name for lora in adapters for name in lora.targets(model)}),
    }


def check_supported(lora: LoRA) -> None:
    """Raise if vLLM does not support adapters.

    Raises:
        ValueError: they have DoRA, or a rank above 512.
    """
    if lora.dora:
        raise UsageError(f"vLLM does not support DoRA's vectors: {_MERGED}")
    if lora.rank > RANKS[-1]:
        raise UsageError(f"vLLM supports adapters up to rank {RANKS[-1]}, but these have rank {lora.rank}: {_MERGED}")


def lora_of(setup: EngineSetup) -> LoRA:
    """Return the actor's adapters.

    Raises:
        ValueError: it has none, or vLLM does not support their rank or DoRA.
    """
    if setup.lora is None:
        raise UsageError(
            "VLLMAdapterEngine pushes LoRA adapters, but the actor has none: set lora in its source, or use VLLMEngine"
        )
    check_supported(setup.lora)
    return setup.lora
