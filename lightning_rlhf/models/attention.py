"""Choice and validation of a model's attention implementation."""

from __future__ import annotations

from typing import Literal, get_args

from transformers import PretrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from lightning_rlhf.expected_errors import UsageError

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"]
_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def set_attention(config: PretrainedConfig, implementation: Attention | None = None) -> PretrainedConfig:
    """Set and validate the attention implementation of a model.

    Models with a soft cap on attention logits, such as Gemma 2, use eager attention, because
    ``scaled_dot_product_attention`` does not support it. The name of a hub repository, also in ``config.json``, is
    rejected, because transformers would download compiled code and run it.

    Args:
        config: configuration of a model; changed in place.
        implementation: implementation that overrides the configuration; None uses the configuration or the default.

    Raises:
        ValueError: the configuration requests an implementation that is not supported.
    """
    if implementation is not None:
        config._attn_implementation = implementation
    requested = config._attn_implementation
    if requested is not None and requested not in get_args(Attention):
        raise UsageError(
            f"the model's configuration requests attn_implementation {requested!r}, expected one of "
            f"{', '.join(get_args(Attention))}: set attn_implementation to one of them (code from the hub is never run)"
        )
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and requested in (None, "sdpa"):
        config._attn_implementation = "eager"
    return config


def check_attention_package(config: PretrainedConfig) -> None:
    """Validate that the package of the attention implementation is installed.

    Without it, transformers would download compiled code from the hub instead.

    Raises:
        ValueError: the package is missing.
    """
    name = config._attn_implementation
    if name in _FLASH and not _FLASH[name]():
        raise UsageError(
            f"attn_implementation {name} needs an NVIDIA GPU and the package flash-attn (flash-attn-3), which is not "
            f"installed here: install it, or use sdpa"
        )
