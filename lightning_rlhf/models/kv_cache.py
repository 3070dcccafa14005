"""Size of vLLM's cache of keys and values on a CPU, where it is given in bytes."""

from __future__ import annotations

import os
from typing import Any

from transformers import PretrainedConfig

BLOCK_TOKENS = 32  # vLLM gives out its cache in blocks of that many tokens
_LEAST_BYTES = 1 << 28
_SHARE = 0.5  # of the memory that is free; the rest is for weights and activations


def bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes that keys and values of one token take in all layers.

    2 x layers x key-value heads x head size x bytes of a number; latent attention keeps its latent vector instead.

    Args:
        config: of the model.
        dtype: ``float32``, or one of two bytes.
    """
    own: Any = config.get_text_config()
    size = 4 if dtype == "float32" else 2
    layers = own.num_hidden_layers
    if getattr(own, "kv_lora_rank", None):
        return int(layers * (own.kv_lora_rank + own.qk_rope_head_dim) * size)
    heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return int(2 * layers * heads * width * size)


def cpu_cache_bytes(config: PretrainedConfig, dtype: str, tokens: int) -> int:
    """Return the size of a cache that holds one text, at least 256 MiB.

    Args:
        config: of the model.
        dtype: of the cache.
        tokens: longest prompt with response.
    """
    blocks = tokens // BLOCK_TOKENS + 2  # one begins, and vLLM keeps one for itself
    return max(_LEAST_BYTES, blocks * BLOCK_TOKENS * bytes_per_token(config, dtype))


def longest_in_memory(config: PretrainedConfig, dtype: str) -> int:
    """Return the tokens of the longest text whose cache takes half of the memory that is free now.

    Args:
        config: of the model.
        dtype: of the cache.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = int(free * _SHARE) // bytes_per_token(config, dtype)
    return max(BLOCK_TOKENS, tokens // BLOCK_TOKENS * BLOCK_TOKENS - 2 * BLOCK_TOKENS)
