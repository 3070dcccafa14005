"""Rarer policy losses with one importance ratio for each token."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from typing_extensions import override

from lightning_rlhf.objectives.base import PolicyLoss, PolicyTokens
from lightning_rlhf.ranges import check_ranges


@dataclass(frozen=True)
class SAPOLoss(PolicyLoss):
    """A soft gate in place of the clip: the further a ratio is from 1, the less its token counts.

        L = -A (4 / tau) sigmoid(tau (r - 1))

    tau is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere. The gradient is the gradient of -A r times 4 p (1 - p),
    p = sigmoid(tau (r - 1)), and this factor is 1 at r = 1.
    See "Soft Adaptive Policy Optimization", Gao et al. 2025, eqs. 5 and 6. The paper's aggregation is
    ``SequenceMeanTokenMean``.

    Args:
        tau_pos: sharpness of the gate where the advantage is positive, positive.
        tau_neg: sharpness elsewhere, positive. It is larger, because pushing one token down lifts many others.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        check_ranges(self, tau_pos="positive", tau_neg="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Diagnostics: the fraction of the gradient let through (``gate``)."""
        advantages = tokens.advantages
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        opened = torch.sigmoid(tau * (torch.exp(tokens.log_ratio) - 1))
        gate = (4 * opened * (1 - opened)).detach()
        return -advantages * 4 / tau * opened, {"gate": gate}


@dataclass(frozen=True)
class DROLoss(PolicyLoss):
    """The policy gradient with a quadratic penalty on the log-ratio, for answers that another policy wrote.

        L = -A logprob + beta / 2 (logprob - old_logprob)^2
        gradient by logprob: -A + beta (logprob - old_logprob)

    Beyond 20 nats the penalty continues as a straight line, so that the pull back neither ends nor explodes.
    See "Offline Regularised Reinforcement Learning for Large Language Models Alignment", Richemond et al. 2024,
    section 3. The paper penalises whole responses, and verl trains with this penalty by token.

    Args:
        beta: weight of the penalty, positive.
    """

    beta: float

    def __post_init__(self) -> None:
        check_ranges(self, beta="positive")

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        penalty = huber_loss(tokens.logprobs, tokens.old_logprobs, reduction="none", delta=20.0)
        return -tokens.advantages * tokens.logprobs + self.beta * penalty, {}


@dataclass(frozen=True)
class DPPOLoss(PolicyLoss):
    """DPPO: drops tokens that would carry the policy out of a trust region, measured by a divergence.

        L = -A sg[min(r, ratio_cap)] logprob

    L is 0 if the token's divergence from the old policy exceeds a bound and would grow. That is where its probability
    rose and A > 0, or fell and A <= 0. The divergence compares the distributions "this token or another", so it needs
    no other probability. See "Rethinking the Trust Region in LLM Reinforcement Learning", Qi et al. 2026 (arXiv
    2602.04879). The default bounds are the paper's.

    Args:
        divergence_low: largest divergence of a token that lost probability, where the advantage is not positive.
        divergence_high: largest divergence of a token that gained probability, where the advantage is positive.
        ratio_cap: largest ratio that counts, at least 1; large, because a cap biases.
    """

    divergence_low: float = 0.15
    divergence_high: float = 0.15
    ratio_cap: float = 20.0

    def __post_init__(self) -> None:
        check_ranges(self, divergence_low="positive", divergence_high="positive", ratio_cap="at least 1")

    @abstractmethod
    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """(B, T) at least 0."""

    @override
    def token_losses(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`PolicyLoss.token_losses`.

        Diagnostics: 1 where a token was dropped (``dropped_fraction``) or is kept with its ratio capped
        (``capped_fraction``).
        """
        new = tokens.logprobs.detach()
        old_logprobs = tokens.old_logprobs
        divergence = self.divergence(new, old_logprobs)
        rose = (divergence > self.divergence_high) & (new > old_logprobs)
        fell = (divergence > self.divergence_low) & (new < old_logprobs)
        dropped = torch.where(tokens.advantages > 0, rose, fell)
        ratio = torch.exp(tokens.log_ratio.detach())
        weight = ratio.clamp(max=self.ratio_cap).masked_fill(dropped, 0)
        return -weight * tokens.advantages * tokens.logprobs, {
            "dropped_fraction": dropped.to(ratio.dtype),
            "capped_fraction": (~dropped & (ratio > self.ratio_cap)).to(ratio.dtype),
        }


@dataclass(frozen=True)
class DPPOTotalVariationLoss(DPPOLoss):
    """:class:`DPPOLoss` by total variation: |p - p_old|, in [0, 1]."""

    @override
    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        return (logprobs.exp() - old_logprobs.exp()).abs()


@dataclass(frozen=True)
class DPPOBernoulliKLLoss(DPPOLoss):
    """:class:`DPPOLoss` by KL: p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), nats."""

    divergence_low: float = 0.05
    divergence_high: float = 0.05

    @override
    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """1 - p is at least 1e-8, because its logarithm has no end."""
        others, old_others = (-torch.expm1(values).clamp(max=-1e-8) for values in (logprobs, old_logprobs))
        gone = old_logprobs.exp() * (old_logprobs - logprobs)
        return gone + old_others * (old_others.log() - others.log())
