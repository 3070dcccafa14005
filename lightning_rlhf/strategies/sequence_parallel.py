"""Sequence parallelism: which models support it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.packed_attention import ARCHITECTURES, has_packed_attention

_LENGTH_DEPENDENT_ROTARY = (
    "dynamic",
    "longrope",
)  # factors depend on the largest position, which differs between parts


def check_sequence_parallel(name: str, model: Any, size: int, tensor_parallel_size: int = 1) -> None:
    """Validate that processes can divide the tokens of a model's rows.

    Args:
        name: name of the role, for messages.
        model: model of transformers, which may be on the meta device.
        size: number of processes.
        tensor_parallel_size: number of processes that split each layer.

    Raises:
        ValueError: they cannot, because of the architecture or its number of heads.
    """
    if size == 1:
        return
    config: PretrainedConfig = model.config
    remedy = "use sequence_parallel_size: 1"
    if config.model_type not in ARCHITECTURES or not has_packed_attention(model):
        raise UsageError(
            f"sequence_parallel_size: {size} is not supported for the {name}'s {type(model).__name__}; supported are "
            f"{', '.join(sorted(ARCHITECTURES))} with their default attention: {remedy}"
        )
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (rotary, *rotary.values()) if isinstance(each, dict)}
    if lengthwise := kinds.intersection(_LENGTH_DEPENDENT_ROTARY):
        raise UsageError(
            f"sequence_parallel_size: {size} does not support the {name}'s rotary positions of type "
            f"{', '.join(sorted(lengthwise))}, whose factors depend on the length of the text: {remedy}"
        )
    heads = config.num_attention_heads
    if heads % (size * tensor_parallel_size):
        product = f"sequence_parallel_size: {size}"
        if tensor_parallel_size > 1:
            product += f" times tensor_parallel_size: {tensor_parallel_size}"
        raise UsageError(f"{product} does not divide the {heads} attention heads of the {name}: use a divisor of them")


def supports_sequence_parallel(model: Any) -> bool:
    """Return whether as many processes as a model has heads, and so each divisor, can divide the tokens of its rows."""
    try:
        check_sequence_parallel("model", model, model.config.get_text_config().num_attention_heads)
    except UsageError:
        return False
    return True
