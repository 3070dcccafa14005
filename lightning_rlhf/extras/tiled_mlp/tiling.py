"""Feed-forward layers in pieces of the sequence, whose inner activations are recomputed in the backward pass."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import text_model_of

_NAMES = ("mlp", "feed_forward", "ffn")  # of the layer in a block


def tile_mlps(lm: Any, tokens: int) -> None:
    """Let the feed-forward layers of a model compute at most some tokens at a time.

    Their inner activations are several times as wide as the hidden states, so they need the most memory in long rows.
    Each piece stores its inputs and computes the rest again in the backward pass. Without dropout, results are equal
    up to rounding. See "Arctic Long Sequence Training", Bekman et al. 2025, section 3.2.

    Args:
        lm: model of transformers; changed in place.
        tokens: most tokens of a piece, positive.

    Raises:
        ValueError: the model has no feed-forward layers that compute each token separately.
    """
    layers = [module for name, module in text_model_of(lm).named_modules() if name.rpartition(".")[2] in _NAMES]
    if not layers or any(_has_router(layer) or len(signature(layer.forward).parameters) != 1 for layer in layers):
        raise UsageError(
            f"mlp_tokens: {type(lm).__name__} has no plain feed-forward layers named {', '.join(_NAMES)}: remove it"
        )
    for layer in layers:
        layer.forward = _Tiled(layer.forward, tokens)


class _Tiled:
    """A layer's forward pass in pieces."""

    def __init__(self, forward: Any, tokens: int) -> None:
        self._forward, self._tokens = forward, tokens

    def __call__(self, states: Tensor) -> Tensor:
        """Compute the layer of (..., T, H) states."""
        if states.shape[-2] <= self._tokens:
            result: Tensor = self._forward(states)
            return result
        pieces = [piece.contiguous() for piece in states.split(self._tokens, dim=-2)]
        if not torch.is_grad_enabled():
            return torch.cat([self._forward(piece) for piece in pieces], dim=-2)
        return torch.cat([checkpoint(self._forward, piece, use_reentrant=False) for piece in pieces], dim=-2)


def _has_router(layer: nn.Module) -> bool:
    return any(name.endswith(("gate", "router", "experts")) for name, _ in layer.named_modules())
