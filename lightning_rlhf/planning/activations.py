"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from lightning_rlhf.functional.logprobs import CHUNK_TOKENS
from lightning_rlhf.planning.architecture import Architecture, Layer
from lightning_rlhf.planning.setup import Precision

_FLOAT = 4  # norms, attention's normalizers and logits are float32 whatever the rest is
_CHUNK_COPIES = 6  # logits, clamped logits, probabilities, their product and gradients; measured by a test
_READERS = 3  # projections that read a norm's output: query, key, value


def layer_bytes(layer: Layer, precision: Precision, split: int = 1, length: int = 0) -> int:
    """Bytes that one decoder layer keeps for each token.

        norms      n (4h + xh + ch) + 4n            input in float32, normalised input, output
        attention  c (2 a/t + 2 k/t) + 4 heads/t    queries, keys, values, output, normalizers
        latent     (4 + 2c) l + 4 for each latent   its norm; c (2 a + v + 2 o) + 4 heads in place of the line above
        squares    (4 + c) heads L, and c a         where attention is written out: L is the length of a text
        MLP        4 c f/t                          gate, up, their activation, the product
        experts    c active (2h + 4 f_e/t) + router

    with h the width, n norms, a, k, v and o the widths of all heads' queries, keys, values and outputs, f the MLP's, t
    the tensor-parallel size, c the bytes of a number in compute and x those of a normalised one. But for the squares no
    term grows with a text's length: attention is computed in blocks. After "Reducing Activation Recomputation in Large
    Transformer Models", Korthikanti et al. 2022, equations 1 and 2, for layers with gates, grouped keys and without
    dropout; the counts are those of transformers' code, and a test compares them with what autograd saves. Under
    autocast every projection keeps its own cast input, and experts compute in float32.

    Args:
        layer: its widths.
        precision: of numbers.
        split: tensor-parallel size.
        length: tokens of a text, for attention that is written out.
    """
    c = precision.compute
    attention = _attention_bytes(layer, precision, length)
    experts = layer.active * (_FLOAT if precision.autocast else c) * (2 * layer.hidden + 4 * layer.expert // split)
    router = _FLOAT * layer.experts + layer.active * 36  # probabilities; places and weights of the chosen
    router += (layer.experts + 36) * layer.wide_router  # which groups may be chosen from, and those that are
    router += _FLOAT * layer.hidden * (layer.wide_router and c < _FLOAT and not precision.autocast)
    router += c * (layer.hidden + 1) * layer.gated_shared
    inside = attention // split + 4 * c * layer.dense // split + experts + router * (layer.experts > 0)
    return _norm_bytes(layer, precision) + inside


def _norm_bytes(layer: Layer, precision: Precision) -> int:
    """Of norms over the residual stream and over latents; what they give is read by projections, unless it is added."""
    c, h = precision.compute, layer.hidden
    latents = sum((_FLOAT + 2 * c) * width + _FLOAT for width in layer.latents) + c * layer.turned * (c == _FLOAT)
    if precision.autocast:
        readers = 2 if layer.latents else _READERS
        readers += 2 * (layer.dense > 0) + (layer.experts > 0) + layer.gated_shared  # gate and up; router
        return layer.norms * (2 * _FLOAT * h + _FLOAT) + readers * c * h + latents
    normalised = _FLOAT if layer.wide_norms else c
    return layer.norms * ((_FLOAT + normalised) * h + _FLOAT) + (layer.norms - layer.post_norms) * c * h + latents


def _attention_bytes(layer: Layer, precision: Precision, length: int) -> int:
    """Of queries, keys, values, and what is made of them."""
    c = precision.compute
    if layer.squares:  # keys and values are repeated for the heads that share them
        return 4 * c * layer.query + layer.heads * length * (_FLOAT + c + c * (c < _FLOAT))
    if layer.latents:
        return c * (layer.query + layer.key + layer.value + 2 * layer.output) + _FLOAT * layer.heads
    found = c * (2 * layer.query + 2 * layer.key) + _FLOAT * layer.heads
    if layer.head_norm:
        widths = layer.query + layer.key
        found += (_FLOAT + c) * widths + _FLOAT * widths * layer.heads // layer.query
    return found


def working_bytes(layer: Layer, precision: Precision, split: int = 1, length: int = 0) -> int:
    """Bytes for each token that the backward pass of a layer holds beside what was kept: gradients inside its MLP.

    Or, where attention is written out, those of its logits.
    """
    inner = layer.dense + layer.active * (layer.expert + layer.hidden * split)
    squares = layer.squares * layer.heads * length * (_FLOAT + precision.compute)
    return max(precision.compute * 3 * inner, squares) // split + precision.compute * layer.hidden


def kept_bytes(
    model: Architecture, precision: Precision, checkpointing: bool, tokens: int, split: int, length: int = 0
) -> int:
    """Bytes that a whole model keeps for the backward pass of one micro-batch.

    The sum over its layers; with checkpointing each layer's input (Korthikanti et al. 2022, section 5). The final norm
    and the states that meet the head come on top.

    Args:
        model: its layers.
        precision: of numbers.
        checkpointing: whether layers are computed again.
        tokens: of the micro-batch, padding included.
        split: tensor-parallel size.
        length: tokens of a text.
    """
    stream = _FLOAT if precision.autocast else precision.compute
    layers = sum(
        stream * model.hidden if checkpointing else layer_bytes(layer, precision, split, length)
        for layer in model.layers
    )
    return tokens * (layers + (_FLOAT + 3 * precision.compute) * model.hidden)


def backward_bytes(
    model: Architecture, precision: Precision, checkpointing: bool, tokens: int, split: int, length: int = 0
) -> int:
    """Bytes beside them while the backward pass is in a layer: its gradients, and the layer if computed again."""
    return tokens * max(
        working_bytes(layer, precision, split, length) + checkpointing * layer_bytes(layer, precision, split, length)
        for layer in model.layers
    )


def forward_bytes(model: Architecture, precision: Precision, tokens: int, split: int, length: int = 0) -> int:
    """Bytes of a pass without gradients: at most what the widest layer would keep."""
    return tokens * max(layer_bytes(layer, precision, split, length) for layer in model.layers)


def logits_bytes(model: Architecture, tokens: int) -> int:
    """Bytes while the log-probabilities of a chunk of tokens are worked out: 6 x 4 x chunk x vocabulary."""
    return _CHUNK_COPIES * _FLOAT * min(tokens, CHUNK_TOKENS) * model.vocabulary
