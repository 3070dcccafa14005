"""Log-probability and entropy of tokens from hidden states, without storing all logits at once."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024


class TokenScores(NamedTuple):
    """A model's log-probs and entropy of each token.

    Args:
        logprobs: (...) float32, of the token.
        entropy: (...) float32, entropy of its distribution, nats.
        sum_pi_squared: (...) float32 without gradient, sum of that distribution's squared probabilities; None
            unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor | None = None


def token_scores(logits: Tensor, targets: Tensor, squares: bool = False) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, in float32.

    logprob = z_target - logsumexp(z);   entropy = logsumexp(z) - sum_v softmax(z)_v z_v   (nats)

    Args:
        logits: (N, V), already divided by the temperature.
        targets: (N,) int64 token ids in [0, V).
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


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Logits of hidden states: linear head, then the constant scale and the tanh cap that some architectures have.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,) or None.
        scale: multiplies the capped logits: 1 / temperature.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None does not cap.

    Returns:
        (N, V) in the dtype of ``hidden``.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if scale == 1.0 else logits * scale


def chunked_token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    squares: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Log-probabilities and entropies of tokens, computed in chunks.

    At most ``chunk_tokens x V`` logits exist at once. With gradients on, the backward pass recomputes each chunk's
    logits, so the memory of the whole (N, V) matrix is never needed. Detach or drop ``entropy`` where the loss does not
    contain it: with its graph, it keeps a second copy of a chunk's logits during the backward pass.

    Args:
        hidden: (N, H) hidden states that predict the targets.
        weight: (V, H) of the language-model head.
        bias: (V,) of the head, or None.
        targets: (N,) int64 token ids in [0, V).
        scale: multiplies the logits: 1 / temperature.
        softcap: soft cap of the logits, see :func:`head_logits`.
        squares: whether to compute ``sum_pi_squared`` too.
        chunk_tokens: tokens in a chunk, at least 1.

    Returns:
        (N,) each.
    """

    def of_chunk(states: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> TokenScores:
        return token_scores(head_logits(states, weight, bias, scale, softcap), ids, squares)

    parts = []
    for states, ids in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, states, ids, weight, bias, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of_chunk(states, ids, weight, bias))
    logprobs, entropy, sums = zip(*parts, strict=True)
    return TokenScores(torch.cat(logprobs), torch.cat(entropy), torch.cat(sums) if squares else None)
