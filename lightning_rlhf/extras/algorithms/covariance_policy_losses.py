"""Policy losses that select tokens of a whole mini-batch: by covariance, to keep the entropy, or by entropy.

A token's covariance is (A - mean A) (logprob - mean logprob), with means over the tokens of the whole mini-batch and
all ranks. Entropy falls where it is large: where likely tokens are rewarded. See "The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", Cui et al. 2025 (arXiv 2505.22617), section 4.2.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import masked_centered
from lightning_rlhf.objectives.base import PolicyLoss, PolicyTokens
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.ranges import check_range, check_ranges

_KINK = 1e-3  # nats; within it |log r| is a parabola


@dataclass(frozen=True)
class ClipCovLoss(ClippedPolicyLoss):
    """:class:`ClippedPolicyLoss` without the gradient of a few tokens with large covariance, drawn at random.

    It draws the given ``fraction`` of the mini-batch's tokens, at least one, from the tokens with a covariance between
    the bounds and a ratio that is not clipped. The loss of the drawn tokens is 0, but they still count in the
    denominator.

    Args:
        fraction: fraction of all tokens, in (0, 1].
        covariance_low: only tokens above it are drawn, advantage times nats.
        covariance_high: only tokens below it are drawn, advantage times nats.
    """

    selects_tokens: ClassVar[bool] = True

    fraction: float = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction(self.fraction)
        if not self.covariance_low < self.covariance_high:
            raise UsageError(
                f"covariance_low must be less than covariance_high, got {self.covariance_low} and "
                f"{self.covariance_high}"
            )

    @override
    def select_tokens(
        self, tokens: PolicyTokens, entropies: Tensor, generator: torch.Generator, ranks: DataRanks = ONE_RANK
    ) -> Tensor:
        _, diagnostics = super().token_losses(tokens)
        is_clipped = (diagnostics["clip_fraction"] + diagnostics["dual_clip_fraction"]) > 0
        large = covariance(tokens, ranks)
        candidates = tokens.mask & ~is_clipped & (large > self.covariance_low) & (large < self.covariance_high)
        count = _count(self.fraction, tokens.mask, ranks)
        return select_largest(torch.zeros_like(large), candidates, count, generator, ranks)

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """``chosen_fraction`` is 1 on the tokens that were drawn."""
        loss, diagnostics = super().token_losses(tokens)
        chosen_fraction = tokens.selected_tokens.to(loss.dtype)
        return loss.masked_fill(tokens.selected_tokens, 0), {**diagnostics, "chosen_fraction": chosen_fraction}


@dataclass(frozen=True)
class KLCovLoss(PolicyLoss):
    """The surrogate without a clip, which holds only the tokens of largest covariance to the old policy.

        L = -A r                                         most tokens
        L = -A r + kl_coef |logprob - old_logprob|       tokens of largest covariance

    The second line applies to ``fraction`` of all tokens of the mini-batch, at least one. If tokens tie for the last
    places, random ones are taken. |log r| is the authors' estimate of the KL in their formula. Within 1e-3 of 0 we use
    a parabola, so that rounding errors do not push an actor that has not moved.

    Args:
        fraction: fraction of all tokens, in (0, 1].
        kl_coef: weight of the penalty, positive.
    """

    selects_tokens: ClassVar[bool] = True

    fraction: float = 2e-4
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        check_ranges(self, kl_coef="positive")

    @override
    def select_tokens(
        self, tokens: PolicyTokens, entropies: Tensor, generator: torch.Generator, ranks: DataRanks = ONE_RANK
    ) -> Tensor:
        large, mask = covariance(tokens, ranks), tokens.mask
        return select_largest(large, mask, _count(self.fraction, mask, ranks), generator, ranks)

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """``chosen_fraction`` is 1 on the tokens that were held."""
        loss = -tokens.advantages * torch.exp(tokens.log_ratio)
        # Not the clamped log-ratio: the tokens that changed most are pulled back too. Near 0 the two
        # differ only by rounding, whose sign would be the gradient: there, a parabola replaces the kink.
        size = huber_loss(tokens.logprobs, tokens.old_logprobs, reduction="none", delta=_KINK) / _KINK + _KINK / 2
        loss = torch.where(tokens.selected_tokens, loss + self.kl_coef * size, loss)
        return loss, {"chosen_fraction": tokens.selected_tokens.to(loss.dtype)}


@dataclass(frozen=True)
class HighEntropyLoss(ClippedPolicyLoss):
    """:class:`ClippedPolicyLoss` on the tokens of highest entropy only, where a response could have gone another way.

    It keeps ``fraction`` of the tokens of the mini-batch and all ranks, at least one. The loss of the others is 0, but
    they still count in the denominator. If tokens tie for the last places, random ones are kept. See "Beyond the 80/20
    Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM Reasoning", Wang et al. 2025,
    equation 4.

    Args:
        fraction: fraction of all tokens, in (0, 1].
    """

    selects_tokens: ClassVar[bool] = True

    fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction(self.fraction)

    @override
    def select_tokens(
        self, tokens: PolicyTokens, entropies: Tensor, generator: torch.Generator, ranks: DataRanks = ONE_RANK
    ) -> Tensor:
        count = _count(self.fraction, tokens.mask, ranks)
        return select_largest(entropies.double(), tokens.mask, count, generator, ranks)

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """``chosen_fraction`` is 1 on the tokens that were kept."""
        loss, diagnostics = super().token_losses(tokens)
        chosen_fraction = tokens.selected_tokens.to(loss.dtype)
        return loss.masked_fill(~tokens.selected_tokens, 0), {**diagnostics, "chosen_fraction": chosen_fraction}


def covariance(tokens: PolicyTokens, ranks: DataRanks = ONE_RANK) -> Tensor:
    """(B, T) float64, each token's part in the covariance of advantages and log-probabilities; 0 outside the mask."""
    from_mean_advantage = masked_centered(tokens.advantages.double(), tokens.mask, ranks)
    product = from_mean_advantage * masked_centered(tokens.logprobs.double(), tokens.mask, ranks)
    return product.masked_fill(~tokens.mask, 0)


def select_largest(
    values: Tensor, candidates: Tensor, count: int, generator: torch.Generator, ranks: DataRanks = ONE_RANK
) -> Tensor:
    """Candidates with the largest values over all ranks; ties for the last places are broken at random.

    Args:
        values: (...) float64, finite.
        candidates: (...) bool.
        count: number of candidates to select over all ranks; all are selected where there are fewer.
        generator: draws for ties; equal seeds on several ranks could leave ties between them and select too many.
        ranks: ranks that select together.

    Returns:
        (...) bool.
    """
    above, tied, missing = _split_at_threshold(values, candidates, count, ranks)
    draws = torch.rand(values.shape, generator=generator, dtype=torch.float64, device=generator.device)
    drawn, last, _ = _split_at_threshold(draws.to(values.device), tied, missing, ranks)
    return above | drawn | last


def _split_at_threshold(
    values: Tensor, candidates: Tensor, count: int, ranks: DataRanks = ONE_RANK
) -> tuple[Tensor, Tensor, int]:
    """Candidates above the count-th largest over all ranks, those equal to it, and how many of these are needed."""
    gathered = ranks.gather(values[candidates])
    count = min(count, len(gathered))
    if not count:
        return torch.zeros_like(candidates), torch.zeros_like(candidates), 0
    threshold = gathered.topk(count).values[-1]
    missing = count - int((gathered > threshold).sum())
    return candidates & (values > threshold), candidates & (values == threshold), missing


def _count(fraction: float, mask: Tensor, ranks: DataRanks = ONE_RANK) -> int:
    """The fraction of all tokens over all ranks, rounded down, and at least one."""
    return max(1, math.floor(fraction * int(ranks.sum(mask.sum().double()))))


def _check_fraction(fraction: float) -> None:
    check_range("fraction", fraction, "in (0, 1]")
