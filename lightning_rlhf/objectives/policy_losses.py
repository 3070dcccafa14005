"""Policy losses that treat each token separately and return one number per token.

The module sums and divides (:mod:`lightning_rlhf.objectives.aggregation`). Losses of whole responses are in
:mod:`lightning_rlhf.extras.algorithms.sequence_policy_losses`, losses that select tokens of the whole mini-batch in
:mod:`lightning_rlhf.extras.algorithms.covariance_policy_losses`.

Everywhere r = exp(logprobs - old_logprobs), whose logarithm is clamped to [-20, 20], and sg stops the gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.objectives.base import PolicyLoss, PolicyTokens
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class ClippedPolicyLoss(PolicyLoss):
    """PPO's clipped surrogate, with separate bounds and dual clip.

        L = max(-A r, -A clip(r, 1 - low, 1 + high))
        L = min(L, -A dual_clip)                        in addition where A < 0

    The second line bounds the loss of a bad token that the policy came to prefer. See "Proximal Policy Optimization
    Algorithms", Schulman et al. 2017, eq. 7, and for the dual clip "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning", Ye et al. 2020, eq. 5.

    Args:
        clip_range: both bounds, in (0, 1), unless the next two override it.
        clip_range_low: largest decrease of the ratio below 1, in (0, 1]. None takes ``clip_range``.
        clip_range_high: largest increase of the ratio above 1, positive. None takes ``clip_range``.
        dual_clip: largest ratio that counts where the advantage is negative, above 1. None switches it off.
    """

    clip_range: float = 0.2
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            clip_range="in (0, 1)",
            clip_range_low="in (0, 1] or null",
            clip_range_high="positive or null",
            dual_clip="greater than 1 or null",
        )

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PolicyLoss.token_losses`.

        Diagnostics: 1 where the clipped branch won (``clip_fraction``) or the dual clip bound
        (``dual_clip_fraction``).
        """
        advantages = tokens.advantages
        ratio = torch.exp(tokens.log_ratio)
        low = self.clip_range if self.clip_range_low is None else self.clip_range_low
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - low, 1 + high)
        loss = torch.maximum(unclipped, clipped)
        dual_clipped = torch.zeros_like(loss)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            dual_clipped = ((advantages < 0) & (loss > bound)).to(loss.dtype)
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        with torch.no_grad():
            clip_fraction = (clipped > unclipped).to(loss.dtype)
        return loss, {"clip_fraction": clip_fraction, "dual_clip_fraction": dual_clipped}


@dataclass(frozen=True)
class ReinforceLoss(PolicyLoss):
    """The plain policy gradient: L = -A logprob, without a ratio and without a clip.

    Use it while the actor is the policy that sampled: one update on each rollout. It is also the loss of GPG ("GPG: A
    Simple and Strong Reinforcement Learning Baseline", Chu et al. 2025), which differs in its advantages.
    See "Simple Statistical Gradient-Following Algorithms", Williams 1992, eq. 11.
    """

    uses_ratio: ClassVar[bool] = False

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -tokens.advantages * tokens.logprobs, {}


@dataclass(frozen=True)
class CISPOLoss(PolicyLoss):
    """The policy gradient weighted by the clipped ratio, so that a clipped token keeps its gradient.

        L = -sg[clip(r, 1 - low, 1 + high)] A logprob

    See "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", MiniMax 2025, eqs. 4 and 5. The
    paper sets no lower bound. Its aggregation is ``TokenMean``.

    Args:
        clip_range_low: largest decrease of the weight below 1, in (0, 1]. None sets no lower bound.
        clip_range_high: largest increase of the weight above 1, positive. The default lets it reach 5, as "The Art of
            Scaling Reinforcement Learning Compute for LLMs", Khatri et al. 2025, recommends.
    """

    clip_range_low: float | None = None
    clip_range_high: float = 4.0

    def __post_init__(self) -> None:
        check_ranges(self, clip_range_low="in (0, 1] or null", clip_range_high="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: 1 where the weight was clipped (``clip_fraction``)."""
        ratio = torch.exp(tokens.log_ratio.detach())
        low = 0.0 if self.clip_range_low is None else 1 - self.clip_range_low
        weight = ratio.clamp(low, 1 + self.clip_range_high)
        clipped = (weight != ratio).to(ratio.dtype)
        return -weight * tokens.advantages * tokens.logprobs, {"clip_fraction": clipped}
