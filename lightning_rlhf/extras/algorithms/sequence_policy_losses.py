"""Policy losses with one importance ratio for a whole response.

Each docstring names the aggregation that gives the loss of its paper; other aggregations weight responses by length.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.objectives.base import PolicyLoss, PolicyTokens
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.ranges import check_ranges


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) mean over each response's policy tokens; 0 for a response without one.

    Args:
        values: (B, T) finite, 0 where the mask is False.
        mask: (B, T) bool.
    """
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class GSPOLoss(PolicyLoss):
    """The clipped surrogate with one ratio for a whole response: the geometric mean of its tokens' ratios.

        s = exp(mean over tokens of (logprobs - old_logprobs))
        s_t = sg[s] exp(logprobs_t - sg[logprobs_t])
        L_t = max(-A_t s_t, -A_t clip(s_t, 1 - low, 1 + high))

    Every s_t equals s, and its gradient goes through token t alone. For the value and gradient of the paper's loss, use
    one advantage for all tokens of a response and ``SequenceMeanTokenMean``. With ``TokenMean``, responses count by
    their length. See "Group Sequence Policy Optimization", Zheng et al. 2025, eqs. 5 and 7, and 13 and 14 (s_t).

    Args:
        clip_range_low: largest decrease of the response's ratio below 1, in (0, 1].
        clip_range_high: largest increase above 1, positive. Both are a thousand times smaller than for tokens, because
            a mean over many tokens stays close to 1. The defaults are the paper's.
    """

    weighs_responses: ClassVar[bool] = True

    clip_range_low: float = 3e-4
    clip_range_high: float = 4e-4

    def __post_init__(self) -> None:
        check_ranges(self, clip_range_low="in (0, 1]", clip_range_high="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: 1 where the clipped branch won (``clip_fraction``)."""
        logprobs = tokens.logprobs
        ratio = torch.exp(response_mean(tokens.log_ratio.detach(), tokens.mask) + (logprobs - logprobs.detach()))
        unclipped = -tokens.advantages * ratio
        clipped = -tokens.advantages * ratio.clamp(1 - self.clip_range_low, 1 + self.clip_range_high)
        clip_fraction = (clipped > unclipped).to(ratio.dtype)
        return torch.maximum(unclipped, clipped), {"clip_fraction": clip_fraction}


@dataclass(frozen=True)
class LUSPOLoss(GSPOLoss):
    """:class:`GSPOLoss` with responses that count by their length, which takes away its pull towards short answers.

    The loss of a response is |y| times the loss of GSPO. Use the paper's aggregation, ``SequenceMeanTokenSum``, because
    with ``SequenceMeanTokenMean`` nothing is left of the difference. See "Length-Unbiased Sequence Policy
    Optimization", Liu et al. 2026 (arXiv 2602.05261). The default bounds are the paper's.
    """

    clip_range_low: float = 2e-3
    clip_range_high: float = 2.5e-3


@dataclass(frozen=True)
class GMPOLoss(PolicyLoss):
    """The geometric mean of the tokens' clipped ratios, which outliers hardly move.

        rho = exp(mean over tokens of c(logprobs - old_logprobs))
        c(x) = min(x, high) where A > 0, max(x, -low) elsewhere
        L = -(mean over tokens of A) rho

    L is the same on every token of a response. The paper's aggregation is ``SequenceMeanTokenMean``.
    See "Geometric-Mean Policy Optimization", Zhao et al. 2025 (arXiv 2507.20673), section 3.

    Args:
        clip_range_low: largest decrease of a token's log-ratio below 0, nats, positive.
        clip_range_high: largest increase above 0, nats, positive. The defaults are the paper's.
    """

    weighs_responses: ClassVar[bool] = True

    clip_range_low: float = 0.4
    clip_range_high: float = 0.4

    def __post_init__(self) -> None:
        check_ranges(self, clip_range_low="positive", clip_range_high="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: 1 where a token's ratio was clipped (``clip_fraction``)."""
        log_ratio = tokens.log_ratio
        upwards = log_ratio.clamp(max=self.clip_range_high)
        clipped = torch.where(tokens.advantages > 0, upwards, log_ratio.clamp(min=-self.clip_range_low))
        loss = -response_mean(tokens.advantages, tokens.mask) * torch.exp(response_mean(clipped, tokens.mask))
        return loss.expand_as(log_ratio), {"clip_fraction": (clipped != log_ratio).to(loss.dtype)}


@dataclass(frozen=True)
class VESPOLoss(PolicyLoss):
    """The policy gradient weighted by a smooth function of the response's whole ratio. A ratio of 1 gets weight 1.

        W = product over tokens of r
        phi(W) = W^k exp(lambda (1 - W))
        L_t = -sg[phi(W)] A_t logprob_t

    The pair (k, lambda) depends on whether A >= 0. log W is clamped to [-20, 20].
    See "VESPO: Variational Sequence-Level Soft Policy Optimization", Shen et al. 2026 (arXiv 2602.10693v3), eq. 20. The
    paper's sum over a response is ``SequenceMeanTokenSum``. The authors' code and TRL take ``TokenMean``.

    Args:
        k_pos: where the advantage is at least 0, how fast the weight falls as W falls below 1, positive.
        lambda_pos: where the advantage is at least 0, how fast the weight falls as W rises, positive.
        k_neg: ``k_pos`` where the advantage is negative.
        lambda_neg: ``lambda_pos`` where the advantage is negative.
    """

    weighs_responses: ClassVar[bool] = True

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        check_ranges(self, k_pos="positive", lambda_pos="positive", k_neg="positive", lambda_neg="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: phi on each token (``sequence_weight``)."""
        log_whole = tokens.log_ratio.detach().sum(dim=1, keepdim=True).clamp(-20, 20)
        fall = 1 - torch.exp(log_whole)
        # In log space, where 20 k and exp(20) lambda are numbers; only their difference is exponentiated.
        positive = self.k_pos * log_whole + self.lambda_pos * fall
        negative = self.k_neg * log_whole + self.lambda_neg * fall
        weight = torch.exp(torch.where(tokens.advantages >= 0, positive, negative))
        return -weight * tokens.advantages * tokens.logprobs, {"sequence_weight": weight}


@dataclass(frozen=True)
class TOPRLoss(PolicyLoss):
    """The policy gradient, with negative responses that lose weight as the policy makes them unlikely.

        W = product over tokens of r
        w = 1 where A >= 0, min(W, 1) elsewhere
        L_t = -sg[w] A_t logprob_t

    A good response counts fully, however unlikely the policy finds it. A bad one that the policy no longer gives gets
    no weight, so its probability is not pushed towards 0 without end. The baseline of your advantages decides which
    responses are negative.
    See "Tapered Off-Policy REINFORCE", Le Roux et al. 2025 (arXiv 2503.14286), section 3. The paper's sum over a
    response is ``SequenceMeanTokenSum``.
    """

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: w on each token (``sequence_weight``)."""
        truncated = torch.exp(tokens.log_ratio.detach().sum(dim=1, keepdim=True).clamp(max=0))
        weight = torch.where(tokens.advantages >= 0, torch.ones_like(truncated), truncated)
        return -weight * tokens.advantages * tokens.logprobs, {"sequence_weight": weight}


@dataclass(frozen=True)
class OffPolicyMaskLoss(ClippedPolicyLoss):
    """:class:`ClippedPolicyLoss` without responses of negative advantage that the current policy would hardly write.

    Such a response is a mistake of an older policy. The loss of its tokens is 0 if A < 0 and the mean of log(rollout /
    current) over the response's tokens is above the threshold. All tokens still count in the denominator.
    See "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, equations 8 and 9.

    Args:
        threshold: largest mean of log(rollout / current) of a response, nats per token, positive.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, threshold="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """``off_policy_fraction`` is 1 on the tokens that are left out."""
        loss, diagnostics = super().token_losses(tokens)
        gap = response_mean(tokens.rollout_logprobs - tokens.logprobs.detach(), tokens.mask)
        left_out = (tokens.advantages < 0) & (gap > self.threshold)
        return loss.masked_fill(left_out, 0), {**diagnostics, "off_policy_fraction": left_out.to(loss.dtype)}
