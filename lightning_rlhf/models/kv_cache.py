"""Size in bytes of vLLM's key-value cache on a CPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

BLOCK_TOKENS = 32  # vLLM allocates its cache in blocks of this many tokens
_EXTRA_BLOCKS = 2  # of each text: one is partly filled, and vLLM reserves another
_CONCURRENT_TEXTS = 64  # texts that the cache has room for, unless a bound below is smaller
_MIN_BYTES = 1 << 28
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
    """Return the bytes of a cache: room for 64 texts, but at most 1 GiB, a 16th of the memory and half of the free one.

    It is never smaller than 256 MiB, nor than one text.

    Args:
        config: configuration of the model.
        dtype: dtype of the cache.
        tokens: number of tokens of the longest prompt and response together.
    """
    blocks = tokens // BLOCK_TOKENS + _EXTRA_BLOCKS
    bytes_per_text = blocks * BLOCK_TOKENS * bytes_per_token(config, dtype)
    sixteenth = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
    wanted = min(_CONCURRENT_TEXTS * bytes_per_text, _MAX_BYTES, sixteenth, _free_share())
    return max(_MIN_BYTES, bytes_per_text, wanted)


def _free_share() -> int:
    """Return the bytes of the free memory that the cache may take; memory of cached files counts as free."""
    return int(_available_bytes() * _MEMORY_FRACTION)


def _available_bytes() -> int:
    """Return the bytes of memory that programs can have without swapping."""
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    if available is not None:
        return int(available[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
