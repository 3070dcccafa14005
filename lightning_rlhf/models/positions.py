"""Validation of text lengths against the position limits in the configurations of models."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.loading import ModelSource

# RoPE scaling types whose max_position_embeddings must be multiplied by the factor, as vLLM does.
_SCALED = ("linear", "dynamic")


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the number of tokens of the longest text that a model accepts.

    Args:
        config: configuration of the model.

    Returns:
        Number of tokens; None for an architecture without a limit.
    """
    text_config = config.get_text_config()
    number = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(number, int) or number < 1:
        return None
    if text_config.model_type.startswith("gemma3"):  # already scaled, also in vLLM
        return number
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]  # global or per layer type
    factors = [part.get("factor") or 1.0 for part in layers if part.get("rope_type") in _SCALED]
    return int(number * max(factors, default=1.0))


def check_positions(roles: Mapping[str, ModelSource], longest_text: int, response: int = 0) -> None:
    """Validate that the longest text with a response fits every model.

    Args:
        roles: model sources by display name.
        longest_text: number of tokens of the longest text of the data.
        response: maximum number of tokens of a response; 0 without responses.

    Raises:
        ValueError: a model accepts fewer tokens; the message contains a setting that fits.
    """
    for name, source in roles.items():
        limit = max_positions(source.hf_config())
        if limit is None or longest_text + response <= limit:
            continue
        has = f"{name} accepts at most {limit} (max_position_embeddings)"
        shorter = "under data.init_args set max_tokens: {} with too_long: drop or cut_start, or use another model"
        if not response:
            raise UsageError(f"the longest text has {longest_text} tokens, and {has}: {shorter.format(limit)}")
        remedy = shorter.format(limit - 1)
        if longest_text < limit:
            remedy = f"set max_response_tokens: {limit - longest_text} or less"
        raise UsageError(
            f"the longest prompt has {longest_text} tokens and a response up to {response} (max_response_tokens), "
            f"{longest_text + response} together, and {has}: {remedy}"
        )
