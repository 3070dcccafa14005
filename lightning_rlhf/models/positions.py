"""Whether models read texts as long as the run has them: known from their configurations, without their weights."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from lightning_rlhf.models.loading import ModelSource

# Of these the configuration's number of positions is the one before stretching, and vLLM multiplies by the factor, too.
_STRETCHED = ("linear", "dynamic")


def positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest text that a model reads.

    Args:
        config: of the model.

    Returns:
        The number; None where the architecture names none, because it has no positions to run out of.
    """
    own = config.get_text_config()
    number = getattr(own, "max_position_embeddings", None)
    if not isinstance(number, int) or number < 1:
        return None
    if own.model_type.startswith("gemma3"):  # counts them after stretching, as vLLM knows, too
        return number
    rope = getattr(own, "rope_parameters", None) or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]  # of each kind of layer, or of all
    stretched = [part.get("factor") or 1.0 for part in layers if part.get("rope_type") in _STRETCHED]
    return int(number * max(stretched, default=1.0))


def check_positions(roles: Mapping[str, ModelSource], text: int, response: int = 0) -> None:
    """Refuse texts that are longer than a model reads.

    Args:
        roles: by what a sentence calls them.
        text: tokens of the longest text of the data.
        response: most tokens of a response behind it, 0 where there is none.

    Raises:
        ValueError: a model has fewer positions; with what would fit.
    """
    for name, source in roles.items():
        limit = positions(source.hf_config())
        if limit is None or text + response <= limit:
            continue
        has = f"{name} reads at most {limit} (max_position_embeddings)"
        shorter = "under data.init_args give max_tokens: {} with too_long: drop or cut_start, or take a longer model"
        if not response:
            raise ValueError(f"the longest text has {text} tokens, and {has}: {shorter.format(limit)}")
        fits = f"give max_response_tokens: {limit - text} or less" if text < limit else shorter.format(limit - 1)
        raise ValueError(
            f"the longest prompt has {text} tokens and a response up to {response} (max_response_tokens), "
            f"{text + response} together, and {has}: {fits}"
        )
