"""The tokens that top-k, top-p and min-p leave to sample from, and log-probabilities over them alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.types import AllowedTokens, SamplingLimits, TokenIds

_LIKELY = 256  # tokens that are sorted at first to find those of a probability; 8 times as many until they suffice


def allowed_tokens(logits: Float[Tensor, "N V"], limits: SamplingLimits) -> Bool[Tensor, "N V"]:
    """Return which tokens can be sampled: min-p, then top-k, then top-p of the tokens that remain, as in vLLM.

    min-p: p_v >= min_p max(p);   top-k: the k largest;   top-p: the fewest likely ones with sum_v p_v >= top_p

    Tokens that are as likely as the last one that is kept are kept too.

    Args:
        logits: already divided by the temperature.
    """
    probabilities = logits.softmax(dim=-1)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if limits.min_p > 0:
        kept &= probabilities >= limits.min_p * probabilities.amax(dim=-1, keepdim=True)
    if 0 < limits.top_k < logits.shape[-1]:
        probabilities = probabilities.masked_fill(~kept, 0)
        kept &= probabilities >= probabilities.topk(limits.top_k, dim=-1).values[:, -1:]
    if limits.top_p < 1:
        probabilities = probabilities.masked_fill(~kept, 0)
        kept &= probabilities >= _least_of_nucleus(probabilities, limits.top_p)
    return kept


def _least_of_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the (N, 1) probability of the last token of the smallest set with a part ``top_p`` of their sum."""
    wanted = top_p * probabilities.sum(dim=-1, keepdim=True)
    size = min(_LIKELY, probabilities.shape[-1])
    while True:
        likely = probabilities.topk(size, dim=-1).values
        below = likely.cumsum(dim=-1) < wanted
        if size == probabilities.shape[-1] or not below[:, -1].any():
            return likely.gather(1, below.sum(dim=-1, keepdim=True).clamp(max=size - 1))
        size = min(8 * size, probabilities.shape[-1])


class Restriction:
    """Removes the logits of tokens that were not allowed; this one allows all tokens."""

    def apply(self, logits: Tensor, part: slice, targets: Tensor) -> None:
        """Set the logits of other tokens to -inf, in place; the target itself is always allowed.

        Args:
            logits: (n, V) logits of some of N targets.
            part: their places among the targets.
            targets: (n,) their token ids.
        """


EVERY_TOKEN = Restriction()


@dataclass(frozen=True)
class Known(Restriction):
    """Tokens that an engine, or an earlier pass, has named.

    Args:
        tokens: (N,) allowed tokens of each target.
    """

    tokens: AllowedTokens

    def apply(self, logits: Tensor, part: slice, targets: Tensor) -> None:
        """See :meth:`Restriction.apply`."""
        tokens = self.tokens.map(lambda values: values[part])
        kept = (tokens.counts == 0).unsqueeze(1).repeat(1, logits.shape[1])
        kept[tokens.listed()] = True
        logits.masked_fill_(~kept.scatter_(1, targets.unsqueeze(1), True), -torch.inf)


@dataclass(frozen=True)
class Found(Restriction):
    """Tokens that limits leave of the model's own logits, which it stores.

    Args:
        limits: limits of the sampling.
        limited: (N,) bool, False for targets that no policy sampled, which have no limits.
    """

    limits: SamplingLimits
    limited: Bool[Tensor, N]
    _parts: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def apply(self, logits: Tensor, part: slice, targets: Tensor) -> None:
        """See :meth:`Restriction.apply`."""
        limited, chosen = self.limited[part], targets.unsqueeze(1)
        kept = allowed_tokens(logits, self.limits)
        added = ~kept.gather(1, chosen).squeeze(1) & limited
        kept.scatter_(1, chosen, True)
        listed = kept & limited.unsqueeze(1)
        self._parts[part.start] = listed.sum(dim=1), listed.nonzero()[:, 1], added
        logits.masked_fill_(~(kept | ~limited.unsqueeze(1)), -torch.inf)

    def tokens(self) -> tuple[Int[Tensor, N], Int[Tensor, M], Bool[Tensor, N]]:
        """Return the number of allowed tokens of each target, their ids, and whether the target itself was added."""
        counts, ids, added = zip(*(self._parts[first] for first in sorted(self._parts)), strict=True)
        return torch.cat(counts), torch.cat(ids), torch.cat(added)


def of_all_ranks(tokens: AllowedTokens, ranks: DataRanks) -> AllowedTokens:
    """Return the tokens of this rank's rows with the ids of all ranks, which exchange rows. All ranks."""
    if ranks.size == 1:
        return tokens
    ids = tokens.ids.on(tokens.device)
    sizes = ranks.gather(torch.tensor([len(ids)], device=ids.device))
    return replace(tokens, starts=tokens.starts + sizes[: ranks.rank].sum(), ids=TokenIds(ranks.gather(ids)))
