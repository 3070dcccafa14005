"""Choice of the engine for ``auto``."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import PretrainedConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.availability import (
    unsupported_accelerator,
    unsupported_model,
    unusable_build,
    vllm_installed,
)
from lightning_rlhf.rollout.vllm.engine import VLLMEngine

_NAMED = {"vllm": VLLMEngine, "transformers": TransformersEngine}
# Sizes of heads that vLLM's CPU attention is compiled for.
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def named_engine(engine: RolloutEngine | Literal["auto", "vllm", "transformers"]) -> RolloutEngine | Literal["auto"]:
    """Return an engine, or the one with a name: ``vllm``, ``transformers``, or a class; ``auto`` remains.

    Raises:
        UsageError: no engine has that name.
    """
    if not isinstance(engine, str) or engine == "auto":
        return engine
    kinds = {**_NAMED, **{kind.__name__: kind for kind in _NAMED.values()}}
    if engine not in kinds:
        raise UsageError(f"engine must be 'auto', {', '.join(map(repr, _NAMED))} or an engine, got {engine!r}")
    return kinds[engine]()


def choose_engine(
    config: PretrainedConfig, ranks: int = 1, dtype: str = "float32", world_size: int = 1, max_tokens: int = 0
) -> tuple[RolloutEngine, str]:
    """Choose vLLM if it supports the machine and the actor, otherwise transformers.

    On GPUs the smallest number of consecutive ranks (1, 2, 4, ...) shares an engine such that the weights use less than
    half of the engine's memory; the rest is for its cache.

    Args:
        config: configuration of the actor.
        ranks: number of ranks that split the actor and share one engine on all of their GPUs.
        dtype: dtype of the engine's weights.
        world_size: number of processes of the run.
        max_tokens: longest prompt and response together, in tokens; 0 if unknown.

    Returns:
        The engine, and a short reason for the choice.

    Raises:
        ValueError: the build of vLLM does not run on this machine, or the model is too large for engines on its GPUs.
    """
    gpus = 1
    if vllm_installed() and torch.cuda.is_available():
        gpus = ranks if world_size == 1 else _gpus_for(weight_bytes(config, dtype), ranks, world_size)
    engine, reason = _choose(config, gpus, max_tokens)
    shared = max(ranks, gpus) if world_size > 1 else ranks
    return (engine if shared == 1 else SharedEngine(engine, shared)), reason


def weight_bytes(config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of a model's parameters in a dtype, without allocating them."""
    with torch.device("meta"):
        model = language_model_class(config).from_config(config, trust_remote_code=False)
    return getattr(torch, dtype).itemsize * sum(parameter.numel() for parameter in model.parameters())


def _gpus_for(weights: int, ranks: int, world_size: int) -> int:
    """Return the number of GPUs of one engine: ``ranks`` times 1, 2, 4, ..., all on one machine.

    Raises:
        ValueError: the model is too large for the GPUs of the machine.
    """
    memory = VLLMEngine().traits.gpu_fraction * torch.cuda.get_device_properties(0).total_memory
    available = min(torch.cuda.device_count(), world_size)
    size = ranks
    while weights / size >= memory / 2:
        size *= 2
        if size > available or world_size % size:
            raise UsageError(
                f"the actor's weights take {weights / 2**30:.1f} GiB, more than half of an engine's memory on "
                f"{size // 2} GPUs ({size // 2} x {memory / 2**30:.1f} GiB), and more ranks cannot share one (this "
                f"machine has {torch.cuda.device_count()} GPUs, the run {world_size} processes): configure "
                f"SharedEngine(VLLMEngine(...)) with a larger gpu_memory_utilization, or VLLMServerEngine"
            )
    return size


def _choose(config: PretrainedConfig, gpus: int, max_tokens: int) -> tuple[RolloutEngine, str]:
    if not vllm_installed():
        return TransformersEngine(), "vLLM is not installed"
    if accelerator := unsupported_accelerator():
        return TransformersEngine(), f"VLLMEngine does not support {accelerator} devices"
    if fault := unusable_build():
        raise UsageError(fault)
    if fault := unsupported_model(config, max_tokens):
        return TransformersEngine(), fault
    config = config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not torch.cuda.is_available() and size not in _CPU_HEAD_SIZES:
        return (
            TransformersEngine(),
            f"vLLM's CPU attention supports head sizes {_CPU_HEAD_SIZES}, but the actor's is {size}",
        )
    reason = "vLLM is installed" + (f", and the actor needs an engine on {gpus} GPUs" if gpus > 1 else "")
    return VLLMEngine(tensor_parallel_size=gpus), reason
