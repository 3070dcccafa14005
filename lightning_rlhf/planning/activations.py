"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from lightning_rlhf.functional.logprobs import CHUNK_TOKENS
from lightning_rlhf.planning.architecture import Architecture, Layer
from lightning_rlhf.planning.setup import Precision

_FLOAT = 4  # norms, attention's normalizers and logits are float32 whatever the rest is
_CHUNK_COPIES = 6  # logits, clamped logits, probabilities, their product and gradients; measured by a test
_READERS = 3  # projections that read a norm's output: query, key, value


def layer_bytes(layer: Layer, precision: Precision, split: int = 1) -> int:
    """Bytes that one decoder layer keeps for each token.

        norms      n (4h + xh + ch) + 4n            input in float32, normalised input, output
        attention  c (2 a/t + 2 k/t) + 4 heads/t    queries, keys, values, output, normalizers
        MLP        4 c f/t                          gate, up, their activation, the product
        experts    c active (2h + 4 f_e/t) + router

    with h the width, n norms, a and k the widths of all heads, f the MLP's, t the tensor-parallel size, c the bytes of
    a number in compute and x those of a normalised one. No term grows with the square of the length: attention is
    computed in blocks. After "Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al. 2022,
    equations 1 and 2, for layers with gates, grouped keys and without dropout; the counts are those of transformers'
    code, and a test compares them with what autograd saves. Under autocast every projection keeps its own cast input,
    and experts compute in float32.

    Args:
        layer: its widths.
        precision: of numbers.
        split: tensor-parallel size.
    """
    c = precision.compute
    if precision.autocast:
        readers = _READERS + 2 * (layer.dense > 0) + (layer.experts > 0)  # gate and up; the router
        norms = layer.norms * (2 * _FLOAT * layer.hidden + _FLOAT) + readers * c * layer.hidden
    else:
        norms = layer.norms * ((_FLOAT + 2 * c) * layer.hidden + _FLOAT)
    attention = c * (2 * layer.query + 2 * layer.key) + _FLOAT * layer.heads
    if layer.head_norm:
        widths = layer.query + layer.key
        attention += (_FLOAT + c) * widths + _FLOAT * widths * layer.heads // layer.query
    experts = layer.active * (_FLOAT if precision.autocast else c) * (2 * layer.hidden + 4 * layer.expert // split)
    router = _FLOAT * layer.experts + layer.active * 36  # probabilities; places and weights of the chosen
    return norms + attention // split + 4 * c * layer.dense // split + experts + router * (layer.experts > 0)


def working_bytes(layer: Layer, precision: Precision, split: int = 1) -> int:
    """Bytes for each token that the backward pass of a layer holds beside what was kept: gradients inside its MLP."""
    inner = layer.dense + layer.active * (layer.expert + layer.hidden * split)
    return precision.compute * (3 * inner // split + layer.hidden)


def kept_bytes(model: Architecture, precision: Precision, checkpointing: bool, tokens: int, split: int) -> int:
    """Bytes that a whole model keeps for the backward pass of one micro-batch.

    The sum over its layers; with checkpointing each layer's input (Korthikanti et al. 2022, section 5). The final norm
    and the states that meet the head come on top.

    Args:
        model: its layers.
        precision: of numbers.
        checkpointing: whether layers are computed again.
        tokens: of the micro-batch, padding included.
        split: tensor-parallel size.
    """
    stream = _FLOAT if precision.autocast else precision.compute
    layers = sum(
        stream * model.hidden if checkpointing else layer_bytes(layer, precision, split) for layer in model.layers
    )
    return tokens * (layers + (_FLOAT + 3 * precision.compute) * model.hidden)


def backward_bytes(model: Architecture, precision: Precision, checkpointing: bool, tokens: int, split: int) -> int:
    """Bytes beside them while the backward pass is in a layer: its gradients, and the layer if computed again."""
    return tokens * max(
        working_bytes(layer, precision, split) + checkpointing * layer_bytes(layer, precision, split)
        for layer in model.layers
    )


def forward_bytes(model: Architecture, precision: Precision, tokens: int, split: int) -> int:
    """Bytes of a pass without gradients: at most what the widest layer would keep."""
    return tokens * max(layer_bytes(layer, precision, split) for layer in model.layers)


def logits_bytes(model: Architecture, tokens: int) -> int:
    """Bytes while the log-probabilities of a chunk of tokens are worked out: 6 x 4 x chunk x vocabulary."""
    return _CHUNK_COPIES * _FLOAT * min(tokens, CHUNK_TOKENS) * model.vocabulary
