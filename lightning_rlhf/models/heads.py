"""The head of a causal language model: how its logits follow from its last hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.products import part_of

# Names of the configuration's factors and caps by architecture, read in transformers' sources. A configuration may
# contain such a name without the architecture using it, as MPT's may contain logit_scale.
_FACTORS = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass_text": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
_DIVISORS = {
    "granite": "logits_scaling",
    "granite_swa": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoe_swa": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "granitemoeshared": "logits_scaling",
    "inkling_text": "logits_mup_width_multiplier",
    "minicpm3": "logits_scaling",
}
_CAPS = {
    "gemma3": None,  # with images, transformers does not apply the cap of the text model
    "recurrent_gemma": "logits_soft_cap",
    "xlstm": "output_logit_soft_cap",
}
_CAP = "final_logit_softcapping"  # of Gemma 2 and its relatives
_REAL_VOCABULARY = "unpadded_vocab_size"  # of Inkling: the logits end there


class Head(NamedTuple):
    """Parts of a head. Logits are ``scale * cap(weight @ transform(hidden) + bias)``.

    Args:
        transform: module applied to hidden states first, or None.
        weight: (V, H).
        bias: (V,) or None.
        scale: factor of the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None does not cap.
    """

    transform: nn.Module | None
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


def head_of(lm: Any, weights: tuple[Tensor, Tensor | None] | None = None) -> Head:
    """Return the head of a language model.

    Args:
        lm: causal language model of transformers.
        weights: full weight and bias of the output layer, where the model has only shards; None uses the model's.
    """
    config = lm.config.get_text_config()
    linear = lm.get_output_embeddings()
    weight, bias = weights or (linear.weight, getattr(linear, "bias", None))
    tokens = getattr(config, _REAL_VOCABULARY, None)
    if tokens is not None and tokens < len(weight):
        weight, bias = weight[:tokens], part_of(bias, slice(tokens))
    kind = config.model_type
    scale = _number(config, _FACTORS.get(kind), 1.0) / _number(config, _DIVISORS.get(kind), 1.0)
    cap = _CAPS.get(lm.config.model_type, _CAPS.get(kind, _CAP))
    softcap = None if cap is None else getattr(config, cap, None)
    transform = lm.lm_head if kind == "modernbert-decoder" else None
    return Head(transform, weight, bias, scale, None if softcap is None else float(softcap))


EXCLUDED = -100.0  # logit of tokens that are never sampled: their probability is 0 in float32


def without_tokens(head: Head, tokens: tuple[int, ...]) -> Head:
    """Return a head with which some tokens have no probability, as in an engine that never samples them.

    Args:
        tokens: ids of the tokens.
    """
    if not tokens:
        return head
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
    excluded = torch.zeros_like(bias)
    excluded[list(tokens)] = EXCLUDED
    return head._replace(bias=bias + excluded)


def _number(config: object, name: str | None, default: float) -> float:
    value = None if name is None else getattr(config, name, None)
    return default if value is None else float(value)


class ShortTextLogprobs(NamedTuple):
    """Log-probs of a short text, for :func:`check_head`.

    Args:
        ours: (T,) log-probabilities by this package's head.
        again: (T,) ``ours``, computed a second time.
        continued: (T,) ``ours``, computed with other tokens after the first ones, for the first ones.
        models: (T,) log-probabilities by the model's own logits.
    """

    ours: Tensor
    again: Tensor
    continued: Tensor
    models: Tensor


def check_head(model: str, logprobs: ShortTextLogprobs, is_exact: bool) -> None:
    """Validate that the log-probs of :class:`CausalLM` are those of the model's own ``forward``, and causal.

    An architecture whose head has a factor, a cap or a layer that this package does not apply would train on other
    probabilities than those it generates with. Texts are padded on the right without a mask, so that later tokens must
    not change earlier log-probs.

    Args:
        model: role and class of the model, for the message.
        logprobs: log-probs of a short text.
        is_exact: whether the model computes in float32.

    Raises:
        ValueError: the log-probs vary from pass to pass or with later tokens, or differ by more than rounding.
    """
    bound = 1e-4 if is_exact else 0.1

    def apart(other: Tensor) -> float:
        return float((logprobs.ours - other).abs().mean())

    if not apart(logprobs.again) <= bound:
        raise UsageError(
            f"{model} computes other log-probabilities in every pass, {apart(logprobs.again):.2g} nats apart on "
            f"average: it draws random numbers, as for dropout or jitter, so that no ratio of probabilities is right. "
            f"Set the field of its configuration that controls them to 0"
        )
    if not apart(logprobs.continued) <= bound:
        raise UsageError(
            f"{model} does not generate from left to right: later tokens change the log-probabilities of earlier ones "
            f"by {apart(logprobs.continued):.2g} nats on average (allowed: {bound:g}). Use a causal language model"
        )
    if not apart(logprobs.models) <= bound:
        raise UsageError(
            f"{model} has a head that lightning-rlhf does not support: log-probabilities of a short text differ by "
            f"{apart(logprobs.models):.2g} nats on average from the model's own (allowed: {bound:g}). "
            f"Use another model, or report the architecture"
        )
