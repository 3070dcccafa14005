"""Which engine ``auto`` means on this machine, and why."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.shared_engine import SharedEngine
from lightning_rlhf.rollout.transformers_engine import TransformersEngine
from lightning_rlhf.rollout.vllm_engine import VLLMEngine, left_idle, vllm_installed

# What vLLM's CPU attention is compiled for.
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def choose_engine(config: PretrainedConfig, ranks: int = 1) -> tuple[RolloutEngine, str]:
    """VLLM where it runs, else transformers.

    Args:
        config: of the actor.
        ranks: that split the actor between them, and so share one engine, on the GPUs of all.

    Returns:
        The engine, and the reason in a few words.
    """
    engine, reason = _choose(config, ranks if torch.cuda.is_available() else 1)
    return (engine if ranks == 1 else SharedEngine(engine, ranks)), reason


def _choose(config: PretrainedConfig, gpus: int) -> tuple[RolloutEngine, str]:
    if not vllm_installed():
        return TransformersEngine(), "vLLM is not installed"
    if found := left_idle():
        return TransformersEngine(), f"VLLMEngine would leave the {found} devices idle"
    config = config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not torch.cuda.is_available() and size not in _CPU_HEAD_SIZES:
        return TransformersEngine(), f"vLLM's CPU attention takes heads of {_CPU_HEAD_SIZES}, the actor's have {size}"
    return VLLMEngine(tensor_parallel_size=gpus), "vLLM is installed"
