"""How the actor learns from advantages. Each loss returns one number per token; the module sums and divides."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.objectives.base import PolicyLoss, approx_kl, log_ratio_of


@dataclass(frozen=True)
class ClippedPolicyLoss(PolicyLoss):
    """PPO's clipped surrogate, with separate bounds and dual clip.

    With r = exp(logprobs - old_logprobs):  L = max(-A r, -A clip(r, 1 - low, 1 + high));
    where A < 0 additionally L = min(L, -A dual_clip), which bounds the loss of a token that the policy came to prefer
    although it was bad. See "Proximal Policy Optimization Algorithms", Schulman et al. 2017, eq. 7, and
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", Ye et al. 2020, eq. 5 (dual clip).

    Args:
        clip_range: both bounds, in (0, 1), unless the next two say otherwise.
        clip_range_low: how far the ratio may fall below 1, in (0, 1]; None takes ``clip_range``.
        clip_range_high: how far the ratio may rise above 1, positive; None takes ``clip_range``.
        dual_clip: largest ratio that counts where the advantage is negative, above 1; None switches it off.
    """

    clip_range: float = 0.2
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range must lie in (0, 1), got {self.clip_range}")
        if self.clip_range_low is not None and not 0 < self.clip_range_low <= 1:
            raise ValueError(f"clip_range_low must lie in (0, 1], got {self.clip_range_low}")
        if self.clip_range_high is not None and not self.clip_range_high > 0:
            raise ValueError(f"clip_range_high must be positive, got {self.clip_range_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be greater than 1, got {self.dual_clip}")

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, chosen: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PolicyLoss.__call__`; what lies outside the mask makes no difference.

        Diagnostics: 1 where the clipped branch won (``clip_fraction``) or the dual clip bound
        (``dual_clip_fraction``).
        """
        log_ratio = log_ratio_of(logprobs, old_logprobs)
        ratio = torch.exp(log_ratio)
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
            diagnostics = {
                "clip_fraction": (clipped > unclipped).to(loss.dtype),
                "dual_clip_fraction": dual_clipped,
                "approx_kl": approx_kl(log_ratio),
            }
        return loss, diagnostics
