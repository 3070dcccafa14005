"""Arguments of vLLM for the LoRA adapters of an actor."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.rollout.engine import EngineSetup

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM 0.32 supports


def adapter_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for the actor's adapters.

    Only the layers that the actor adapts are wrapped. Without this list vLLM wraps the head too, which costs time at
    each token, and then fails to compute log-probs of prompts (vLLM 0.32).
    """
    lora = lora_of(setup)
    config = AutoConfig.from_pretrained(setup.model, trust_remote_code=False)
    with torch.device("meta"):
        model = language_model_class(config).from_config(config, trust_remote_code=False)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": sorted(lora.targets(model)),
    }


def lora_of(setup: EngineSetup) -> LoRA:
    """Return the actor's adapters.

    Raises:
        ValueError: it has none, or vLLM does not support their rank or DoRA.
    """
    if setup.lora is None:
        raise UsageError(
            "VLLMAdapterEngine pushes LoRA adapters, but the actor has none: set lora in its source, or use VLLMEngine"
        )
    if setup.lora.dora:
        raise UsageError("vLLM does not support DoRA's vectors: use VLLMEngine, which gets merged weights")
    if setup.lora.rank > RANKS[-1]:
        raise UsageError(
            f"vLLM supports adapters up to rank {RANKS[-1]}, but the actor's have rank {setup.lora.rank}: use "
            f"VLLMEngine, which gets merged weights"
        )
    return setup.lora
