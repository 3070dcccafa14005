"""Log-probability and entropy of tokens from hidden states, without storing all logits at once."""

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_rlhf.functional.allowed_tokens import EVERY_TOKEN, Restriction
from lightning_rlhf.functional.products import linear, linear_into, part_of
from lightning_rlhf.types import AllowedTokens

# Memory of the logits that are computed at a time. On a CPU they fit into its caches. On a GPU each chunk reads the
# whole head, and its backward pass writes a gradient of the same size, so that few large chunks move fewer bytes.
_CPU_CHUNK_BYTES = 16 << 20
_GPU_CHUNK_BYTES = 512 << 20
# Memory of the probabilities that are kept for the backward pass, which computes the others again.
_CPU_KEEP_BYTES = 64 << 20
_GPU_KEEP_BYTES = 512 << 20


class Float32Logits(nn.Linear):
    """A linear head whose results are float32 even where its inputs and its weight are bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the (..., V) logits of (..., H) hidden states."""
        rows, weight, bias = in_one_dtype(input.flatten(0, -2), self.weight, self.bias)
        out = torch.empty(len(rows), len(weight), device=rows.device, dtype=torch.float32)
        return linear_into(out, rows, weight, bias).unflatten(0, input.shape[:-1])


class ActorScores(Protocol):
    """What every loss of an actor has: (B, T) log-probability and entropy of each token."""

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of the token."""

    @property
    def entropy(self) -> Tensor:
        """Entropy of its distribution, nats."""


class TokenScores(NamedTuple):
    """A model's log-probs and entropy of each token.

    Args:
        logprobs: log-probability of the token.
        entropy: entropy of its distribution, nats.
        sum_pi_squared: without gradient, sum of that distribution's squared probabilities; None
            unless requested.
        allowed: tokens that limits of the sampling leave; None unless they were to be found.
    """

    logprobs: Float32[Tensor, "..."]
    entropy: Float32[Tensor, "..."]
    sum_pi_squared: Float32[Tensor, "..."] | None = None
    allowed: AllowedTokens | None = None


def chunk_bytes_on(device_type: str) -> int:
    """Return the memory of the float32 logits that the head computes at a time on a type of device, bytes."""
    return _CPU_CHUNK_BYTES if device_type == "cpu" else _GPU_CHUNK_BYTES


def keep_bytes_on(device_type: str) -> int:
    """Return the memory of the probabilities that the head keeps for its backward pass on a type of device, bytes."""
    return _CPU_KEEP_BYTES if device_type == "cpu" else _GPU_KEEP_BYTES


def token_scores(logits: Float[Tensor, "*N V"], targets: Int[Tensor, "*N"], squares: bool = False) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, in float32.

    logprob = z_target - logsumexp(z);   entropy = logsumexp(z) - sum_v softmax(z)_v z_v   (nats)

    Args:
        logits: already divided by the temperature.
        targets: token ids in [0, V).
        squares: whether to compute ``sum_pi_squared`` too.

    Returns:
        (N,) each.
    """
    # A vocabulary padded with -inf has probability 0 there, and 0 times -inf is NaN.
    logits = logits.float().clamp(min=torch.finfo(torch.float32).min)
    normalizer = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    probabilities = logits.softmax(dim=-1)
    entropy = normalizer - (probabilities * logits).sum(dim=-1)
    return TokenScores(logprobs, entropy, probabilities.detach().square().sum(dim=-1) if squares else None)


def head_logits(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, "V"] | None,
    scale: float,
    softcap: float | None,
    out: Float[Tensor, "N V"],
    rounds_to: torch.dtype | None = None,
) -> Tensor:
    """Logits of hidden states: linear head, then the tanh cap and the constant scale that some architectures have.

    Args:
        hidden: of :func:`in_one_dtype`, as ``weight`` and ``bias``.
        scale: multiplies the capped logits: 1 / temperature.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None does not cap.
        out: memory of the result.
        rounds_to: dtype to which the head's results are rounded; None keeps them in the dtype of ``out``.

    Returns:
        ``out``.
    """
    linear_into(out, hidden, weight, bias)
    if rounds_to is not None:
        out.copy_(out.to(rounds_to))
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    if scale == 1.0:
        return out
    return out.mul_(scale)


def chunked_token_scores(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, "V"] | None,
    targets: Int[Tensor, "N"],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    float32_logits: bool = True,
    restriction: Restriction = EVERY_TOKEN,
    chunk_bytes: int | None = None,
    keep_bytes: int | None = None,
) -> TokenScores:
    """Log-probabilities and entropies of tokens, computed in chunks of bounded memory.

    The backward pass is written by hand: with probabilities p and the gradients g and h of log-probability and entropy,

    d loss / d logits = g (onehot - p) - h p (log p + entropy).

    A loss without the entropy costs nothing for it. Gradients of gradients are not available.

    Args:
        hidden: hidden states that predict the targets.
        weight: weight of the language-model head.
        bias: bias of the head, or None.
        targets: token ids in [0, V).
        scale: multiplies the logits: 1 / temperature.
        softcap: soft cap of the logits, see :func:`head_logits`.
        squares: whether to compute ``sum_pi_squared`` too.
        float32_logits: whether a head in bfloat16 has float32 results, which are not rounded to bfloat16.
        restriction: the tokens over which the distributions are computed.
        chunk_bytes: largest memory of the float32 logits of a chunk; a chunk has at least one token. None is
            that of :func:`chunk_bytes_on`.
        keep_bytes: largest memory of the probabilities that are kept for the backward pass. None is that of
            :func:`keep_bytes_on`.

    Returns:
        (N,) each.
    """
    if len(hidden) != len(targets):
        raise ValueError(f"one target for each hidden state expected, got {len(targets)} for {len(hidden)}")
    device = hidden.device.type
    rounds_to = None if float32_logits else dtype_of_head(hidden)
    hidden, weight, bias = in_one_dtype(hidden, weight, bias)
    chunk_bytes = chunk_bytes_on(device) if chunk_bytes is None else chunk_bytes
    keep_bytes = keep_bytes_on(device) if keep_bytes is None else keep_bytes
    chunk = max(1, chunk_bytes // (4 * len(weight)))
    stored_tokens = 0
    if torch.is_grad_enabled() and softcap is None:
        stored_tokens = keep_bytes // (4 * len(weight))
    options = (scale, softcap, rounds_to, squares, restriction, chunk, stored_tokens)
    logprobs, entropy, sums = _HeadScores.apply(hidden, weight, bias, targets, *options)
    return TokenScores(logprobs, entropy, sums)


def in_one_dtype(
    hidden: Float[Tensor, "N H"], weight: Float[Tensor, "V H"], bias: Float[Tensor, "V"] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states and a head, rounded to the dtype of the states, or to that of autocast.

    On a CPU, narrower values are in float32 memory: torch multiplies bfloat16 with float32 results on a GPU alone.
    """
    dtype = dtype_of_head(hidden)
    memory = torch.promote_types(dtype, torch.float32) if hidden.device.type == "cpu" else dtype
    rounded = [None if tensor is None else tensor.to(dtype).to(memory) for tensor in (hidden, weight, bias)]
    return rounded[0], rounded[1], rounded[2]  # type: ignore[return-value]


def dtype_of_head(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which a head computes: that of autocast, or of the hidden states without it."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _HeadScores(torch.autograd.Function):
    """Scores of tokens by chunks; see :func:`chunked_token_scores`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        rounds_to: torch.dtype | None,
        squares: bool,
        restriction: Restriction,
        chunk: int,
        stored_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute log-probs and entropies; store the probabilities of the first ``stored_tokens`` tokens."""
        parts: list[tuple[Tensor, Tensor, Any]] = []
        stored_tokens = stored_tokens // chunk * chunk if stored_tokens < len(hidden) else len(hidden)
        stored = _memory(hidden, weight, stored_tokens)
        # Fresh memory for each chunk would cost page faults, and fragments the heap.
        buffer = _memory(hidden, weight, min(chunk, len(hidden)))
        spare = torch.empty_like(buffer) if stored_tokens < len(hidden) else buffer
        for first in range(0, max(1, len(hidden)), chunk):
            part = slice(first, first + chunk)
            ids = targets[part]
            logits = head_logits(
                hidden[part], weight, bias, scale, softcap, out=buffer[: len(ids)], rounds_to=rounds_to
            )
            restriction.apply(logits, part, ids)
            largest = logits.amax(dim=-1, keepdim=True)
            logits.sub_(largest)
            chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            weights = torch.exp(logits, out=stored[part] if first < stored_tokens else spare[: len(ids)])
            total = weights.sum(dim=-1)
            # A vocabulary padded with -inf has probability 0 there, and 0 times -inf is NaN.
            logits.clamp_(min=torch.finfo(logits.dtype).min)
            # A sum of products; the product of a row and a column as matrices would lose digits in float32.
            mean = logits.mul_(weights).sum(dim=-1) / total
            normalizer = total.log()
            sums = torch.mul(weights, weights, out=logits).sum(dim=-1) / total.square() if squares else None
            parts.append((chosen - normalizer, normalizer - mean, sums))
            if first < stored_tokens:
                weights.div_(total.unsqueeze(-1))
        logprobs, entropies, squared = zip(*parts, strict=True)
        outputs = torch.cat(logprobs), torch.cat(entropies), torch.cat(squared) if squares else None
        ctx.save_for_backward(hidden, weight, bias, targets, outputs[1])
        ctx.options = scale, softcap, rounds_to, restriction, chunk
        ctx.stored = stored
        ctx.set_materialize_grads(False)
        if squares:
            ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, _: Tensor | None) -> Any:
        """Compute the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        scale, softcap, rounds_to, restriction, chunk = ctx.options
        stored, ctx.stored = ctx.stored, None  # this pass overwrites it; a second one computes all again
        stored_tokens = 0 if stored is None else len(stored)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = None
        bias_gradient = torch.zeros_like(bias).float() if wants_bias else None
        # The weight's gradient is read and written once for a block; all else is computed by chunks.
        size = stored_tokens or min(chunk, len(hidden))
        memory = stored if stored_tokens else _memory(hidden, weight, size)
        for begin in range(0, len(hidden), max(1, size)):
            states = hidden[begin : begin + size]
            for first in range(begin, begin + len(states), chunk):
                part = slice(first, min(first + chunk, begin + len(states)))
                gradient = memory[part.start - begin : part.stop - begin]
                slope = None
                if first >= stored_tokens:
                    logits = head_logits(hidden[part], weight, bias, scale, softcap, out=gradient, rounds_to=rounds_to)
                    if softcap is not None:
                        slope = 1 - (logits / (scale * softcap)).square()
                    restriction.apply(logits, part, targets[part])
                    logits.sub_(logits.logsumexp(dim=-1, keepdim=True)).exp_()
                _to_gradient(
                    gradient,
                    targets[part],
                    part_of(of_logprobs, part),
                    part_of(of_entropy, part),
                    entropy[part],
                )
                gradient.mul_(scale if slope is None else slope.mul_(scale))
                if hidden_gradient is not None:
                    hidden_gradient[part] = linear(gradient.to(hidden.dtype), weight.T)
            gradient = memory[: len(states)]
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
            if wants_weight:
                weight_gradient = add_product(weight_gradient, gradient.to(hidden.dtype).T, states)
        if wants_weight:
            weight_gradient = torch.zeros_like(weight) if weight_gradient is None else weight_gradient.to(weight.dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, *[None] * 8


def _memory(hidden: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """Return (tokens, V) uninitialised float32 memory."""
    return hidden.new_empty(0).float().new_empty(tokens, len(weight))


def add_product(
    total: Float[Tensor, "V H"] | None, first: Float[Tensor, "V N"], second: Float[Tensor, "N H"]
) -> Tensor:
    """Return a sum of matrix products with one more, in float32 or better; changed in place, and None is an empty sum.

    Args:
        total: sum so far, or None.
    """
    if total is None:
        return linear(first, second.T).to(torch.promote_types(first.dtype, torch.float32))
    if total.dtype == second.dtype:
        return total.addmm_(first, second)
    return total.add_(first @ second)


def _to_gradient(
    probabilities: Tensor, targets: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None, entropy: Tensor
) -> None:
    """Replace the probabilities of a chunk by the gradient of its logits."""
    by_entropy = None
    if of_entropy is not None:
        surprise = torch.xlogy(probabilities, probabilities).add_(entropy.unsqueeze(-1) * probabilities)
        by_entropy = surprise.mul_(of_entropy.unsqueeze(-1))
    if of_logprobs is None:
        probabilities.zero_()
    else:
        probabilities.mul_(-of_logprobs.unsqueeze(-1))
        probabilities.scatter_add_(1, targets.unsqueeze(-1), of_logprobs.unsqueeze(-1))
    if by_entropy is not None:
        probabilities.sub_(by_entropy)
