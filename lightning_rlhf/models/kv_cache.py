"""Size in bytes of vLLM's key-value cache on a CPU."""

from __future__ import annotations

import os
from typing import Any

from transformers import PretrainedConfig

BLOCK_TOKENS = 32  # vLLM allocates its cache in blocks of this many tokens
_MIN_BYTES = 1 << 28
_TEXTS = 64  # texts that vLLM generates at the same time, if they do not take more than the bounds of the memory
_MAX_BYTES = 1 << 30
_MEMORY_FRACTION = 0.5  # part of the free memory for the cache; the rest is for weights and activations


def bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers.

    2 x layers x key-value heads x head size x bytes per number; latent attention stores its latent vector instead.

    Args:
        config: configuration of the model.
        dtype: ``float32``, or a dtype of two bytes.
    """
    text_config: Any = config.get_text_config()
    size = 4 if dtype == "float32" else 2
    layers = text_config.num_hidden_layers
    if getattr(text_config, "kv_lora_rank", None):
        return int(layers * (text_config.kv_lora_rank + text_config.qk_rope_head_dim) * size)
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return int(2 * layers * heads * width * size)


def cpu_cache_bytes(config: PretrainedConfig, dtype: str, tokens: int) -> int:
    """Return the bytes of a cache for 64 texts, at most 1 GiB, a 16th of the memory and half of the free memory.

    The cache has room for at least one text, and 256 MiB.

    Args:
        config: configuration of the model.
        dtype: dtype of the cache.
        tokens: number of tokens of the longest prompt and response together.
    """
    blocks = tokens // BLOCK_TOKENS + 2  # one more is partly filled, and vLLM reserves another
    text = blocks * BLOCK_TOKENS * bytes_per_token(config, dtype)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_MIN_BYTES, text, min(_TEXTS * text, _MAX_BYTES, memory // 16, _free_share()))


def longest_in_memory(config: PretrainedConfig, dtype: str) -> int:
    """Return the number of tokens whose cache fits in half of the free memory.

    Args:
        config: configuration of the model.
        dtype: dtype of the cache.
    """
    tokens = _free_share() // bytes_per_token(config, dtype)
    return max(BLOCK_TOKENS, tokens // BLOCK_TOKENS * BLOCK_TOKENS - 2 * BLOCK_TOKENS)


def _free_share() -> int:
    """Return the bytes of the free memory that the cache may take."""
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _MEMORY_FRACTION)
