"""Which code computes attention: such as is installed here, and all of what the architecture was trained with."""

from __future__ import annotations

from typing import Literal, get_args

from transformers import PretrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def checked_attention(config: PretrainedConfig, wanted: Attention | None = None) -> PretrainedConfig:
    """Settle who computes a model's attention.

    ``scaled_dot_product_attention`` knows no soft cap on attention logits, which Gemma 2 was trained with: there
    attention is written out instead. The name of a repository would have transformers fetch compiled code from the hub
    and run it, also if only a model's own ``config.json`` asks for it.

    Args:
        config: of a model; changed.
        wanted: in place of what the configuration asks for; None leaves the choice to it, and then to transformers.

    Raises:
        ValueError: the configuration asks for another.
    """
    if wanted is not None:
        config._attn_implementation = wanted
    found = config._attn_implementation
    if found is not None and found not in get_args(Attention):
        raise ValueError(
            f"the model's configuration asks for attention by {found!r}, expected one of "
            f"{', '.join(get_args(Attention))}: set attn_implementation to one of them (code from the hub is never run)"
        )
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and found in (None, "sdpa"):
        config._attn_implementation = "eager"
    return config


def expect_installed(config: PretrainedConfig) -> None:
    """Refuse attention whose package is absent, for transformers would fetch compiled code from the hub in its place.

    Raises:
        ValueError: it is.
    """
    name = config._attn_implementation
    if name in _FLASH and not _FLASH[name]():
        raise ValueError(
            f"attn_implementation {name} needs an NVIDIA GPU and the package flash-attn (flash-attn-3), which is not "
            f"installed here: install it, or take sdpa"
        )
