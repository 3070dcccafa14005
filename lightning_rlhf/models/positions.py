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


def rotary_length(config: PretrainedConfig, *rope_types: str) -> int | None:
    """Return the length from which on texts have other rotary frequencies; None where all have the same.

    transformers chooses the frequencies of a whole forward pass by its longest text: those of ``longrope`` are one set
    up to the original number of positions and another one above it. Those of ``dynamic`` follow each longer text.

    Args:
        config: configuration of the model.
        *rope_types: types of scaling to look for.

    Returns:
        Number of tokens of the longest text with the original frequencies.
    """
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    lengths = [
        part.get("original_max_position_embeddings") or text_config.max_position_embeddings
        for part in layers
        if part.get("rope_type") in rope_types
    ]
    return min(lengths, default=None)


def check_positions(
    roles: Mapping[str, ModelSource], longest_text: int, response: int = 0, has_pairs: bool = False
) -> None:
    """Validate that the longest text with a response fits every model.

    Args:
        roles: model sources by display name.
        longest_text: number of tokens of the longest text of the data.
        response: maximum number of tokens of a response; 0 without responses.
        has_pairs: whether a row is a pair of texts, which are evaluated together.

    Raises:
        ValueError: a model accepts fewer tokens, or computes the log-probs of a text by the longest text beside it;
            the message contains a setting that fits.
    """
    for name, source in roles.items():
        config = source.hf_config()
        length = rotary_length(config, "dynamic", "longrope") if has_pairs else rotary_length(config, "dynamic")
        if length is not None and longest_text + response > length:
            raise UsageError(
                f"{name} scales its rotary positions by the longest text that it is evaluated with, so that texts of "
                f"more than {length} tokens would change the log-probabilities of others, and texts of this run have "
                f"up to {longest_text + response}: use at most {length} tokens, or another rope_type (yarn, linear)"
            )
        limit = max_positions(config)
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
