"""Memory of activations: the tensors that a forward pass keeps for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlhf.extras.plan.architecture import Architecture, Layer
from lightning_rlhf.extras.plan.setup import Precision
from lightning_rlhf.functional.logprobs import chunk_bytes_on, keep_bytes_on

_FLOAT = 4  # norms, attention's normalizers and logits are float32 in every precision
_CHUNK_COPIES = 3  # logits, their exponentials, and the gradient of the logits; kept probabilities are one of them
_INDEX_BYTES = 36  # indices and weights of one expert that a token passes


@dataclass(frozen=True)
class Pass:
    """One forward pass of a micro-batch through a model, and its backward pass.

    Args:
        model: shapes of the model.
        precision: bytes per element.
        tokens: tokens of the micro-batch, padding included.
        split: tensor-parallel size.
        length: tokens of one text, for attention without a fused kernel.
        checkpointing: whether the backward pass recomputes the activations of a layer.
        trains_head: whether the weight of the head has a gradient; that beside adapters and of a frozen role has none.
    """

    model: Architecture
    precision: Precision
    tokens: int
    split: int = 1
    length: int = 0
    checkpointing: bool = False
    trains_head: bool = True

    def kept_bytes(self) -> int:
        """Compute the bytes that the model keeps for the backward pass.

        The sum over the layers; with checkpointing only the input of each (Korthikanti et al. 2022, section 5). The
        final norm and the hidden states before the head are added.
        """
        compute = self.precision.compute
        stream = _FLOAT if self.precision.autocast else compute
        if self.checkpointing:
            layers = len(self.model.layers) * stream * self.model.hidden
        else:
            layers = sum(self.layer_bytes(layer) for layer in self.model.layers)
        return self.tokens * (layers + (_FLOAT + 3 * compute) * self.model.hidden)

    def layer_kept_bytes(self) -> int:
        """Compute the most bytes that one layer keeps: with activation_offload, those on the GPU at a time."""
        return self.tokens * max(self.layer_bytes(layer) for layer in self.model.layers)

    def backward_bytes(self) -> int:
        """Compute the additional bytes of the backward pass in a layer: gradients, and recomputed activations."""
        per_token = [
            self._working_bytes(layer) + self.checkpointing * self.layer_bytes(layer) for layer in self.model.layers
        ]
        return self.tokens * max(per_token)

    def forward_bytes(self) -> int:
        """Compute the bytes of a pass without gradients: at most those that the widest layer would keep."""
        return self.tokens * max(self.layer_bytes(layer) for layer in self.model.layers)

    def logits_bytes(self) -> int:
        """Compute the bytes of the head on a GPU: kept probabilities, logits of a chunk, gradient of the weight."""
        logits = _FLOAT * self.tokens * self.model.vocabulary
        stored = min(logits, keep_bytes_on("cuda"))
        chunks = (_CHUNK_COPIES - (stored == logits)) * min(logits, chunk_bytes_on("cuda"))
        return stored + chunks + self.trains_head * _FLOAT * self.model.hidden * self.model.vocabulary

    def layer_bytes(self, layer: Layer) -> int:
        """Compute the bytes per token that one decoder layer keeps for the backward pass.

            norms      n (4h + xh + ch) + 4n            input in float32, normalised input, output
            attention  c (2 a/t + 2 k/t) + 4 heads/t    queries, keys, values, output, normalizers
            packed     c a/t                            outputs of all texts in one row
            latent     (4 + 2c) l + 4 per latent        norm of the latent; attention is c (2 a + v + 2 o) + 4 heads
            eager      (4 + c) heads L, and c a         attention without a fused kernel, for texts of L tokens
            MLP        4 c f/t                          gate, up, their activation, the product
            experts    c active (2h + 4 f_e/t) + router

        with h the width, n norms, a, k, v and o the widths of all heads' queries, keys, values and outputs, f the
        MLP's, t the tensor-parallel size, c the bytes per element in compute and x those of a normalised input. Only
        the eager term depends on the length: fused kernels compute attention in blocks. After "Reducing Activation
        Recomputation in Large Transformer Models", Korthikanti et al. 2022, equations 1 and 2, for layers with gates
        and grouped keys and without dropout; the counts are those of transformers' code, and a test compares them with
        the tensors that autograd saves. Under autocast every projection keeps a cast input, and experts compute in
        float32. In float32, texts of unlike lengths share calls of attention, whose padding (at most a quarter of the
        attention's bytes) is not counted.
        """
        attention = self._attention_bytes(layer) // self.split
        mlp = 4 * self.precision.compute * layer.dense // self.split
        return self._norm_bytes(layer) + attention + mlp + self._expert_bytes(layer)

    def _working_bytes(self, layer: Layer) -> int:
        """Compute the bytes per token of gradients inside a layer: of its MLP, or of eager attention's logits."""
        c = self.precision.compute
        inner = layer.dense + layer.active * (layer.expert + layer.hidden * self.split)
        logits = layer.eager * layer.heads * self.length * (_FLOAT + c)
        return max(c * 3 * inner, logits) // self.split + c * layer.hidden

    def _norm_bytes(self, layer: Layer) -> int:
        """Compute the bytes of norms, with the outputs that projections keep as inputs."""
        c = self.precision.compute
        h = layer.hidden
        latents = sum((_FLOAT + 2 * c) * width + _FLOAT for width in layer.latents)
        if c == _FLOAT:
            latents += c * layer.rotary
        if self.precision.autocast:
            # those of the attention's input
            projections = 3
            if layer.latents:
                projections = 2
            projections += 2 * (layer.dense > 0) + (layer.experts > 0) + layer.gated_shared  # gate and up; router
            return layer.norms * (2 * _FLOAT * h + _FLOAT) + projections * c * h + latents
        normalised = _FLOAT if layer.wide_norms else c
        before_blocks = layer.norms - layer.post_norms
        return layer.norms * ((_FLOAT + normalised) * h + _FLOAT) + before_blocks * c * h + latents

    def _attention_bytes(self, layer: Layer) -> int:
        c = self.precision.compute
        if layer.eager:  # keys and values are repeated for the heads that share them
            probabilities = c + (c if c < _FLOAT else 0)
            return 4 * c * layer.query + layer.heads * self.length * (_FLOAT + probabilities)
        if layer.latents:
            return c * (layer.query + layer.key + layer.value + 2 * layer.output) + _FLOAT * layer.heads
        size = c * (2 * layer.query + 2 * layer.key + layer.packed * layer.query) + _FLOAT * layer.heads
        if layer.head_norm:
            widths = layer.query + layer.key
            size += (_FLOAT + c) * widths + _FLOAT * widths * layer.heads // layer.query
        return size

    def _expert_bytes(self, layer: Layer) -> int:
        """Compute the bytes of the experts that a token passes, and of the router."""
        if not layer.experts:
            return 0
        c = self.precision.compute
        element = _FLOAT if self.precision.autocast else c
        experts = layer.active * element * (2 * layer.hidden + 4 * layer.expert // self.split)
        router = _FLOAT * layer.experts + layer.active * _INDEX_BYTES
        if layer.wide_router:
            router += layer.experts + _INDEX_BYTES  # the groups of experts
            if c < _FLOAT and not self.precision.autocast:
                router += _FLOAT * layer.hidden
        if layer.gated_shared:
            router += c * (layer.hidden + 1)
        return experts + router
