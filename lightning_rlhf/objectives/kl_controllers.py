"""How strongly the actor is held to the reference, in the reward or in the loss, and how that changes."""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.kl import KLEstimator, kl_estimate
from lightning_rlhf.objectives.base import log_ratio_of


@dataclass(frozen=True)
class KLTerm:
    """A KL term: its weight and its estimator.

    Args:
        coef: weight, at least 0; 0 switches the term off.
        estimator: estimator of the KL, see :func:`lightning_rlhf.functional.kl.kl_estimate`. In the
            reward, k1 and k3 are unbiased; in the
            loss, k2, k3+, k1+ and abs+ have the gradient of KL(actor || ref), k3 that of KL(ref || actor), and k1 one
            that is zero in expectation.
        clamp: largest absolute value of a token's estimate, nats, positive; None, the default, leaves it.
        importance: whether each estimate is multiplied by the ratio of the actor to the one that drew the token, with
            gradient. In expectation over tokens of the old actor, value and gradient of k1 and k3 are then those of
            KL(actor || ref), however far the actor has moved ("DeepSeek-V3.2", DeepSeek-AI 2025, section 3.1). Only
            in the loss: in the reward the ratio is 1.
    """

    coef: float = 0.0
    estimator: KLEstimator = "k1"
    clamp: float | None = None
    importance: bool = False

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise UsageError(f"KL coef must be at least 0, got {self.coef}")
        if self.estimator not in get_args(KLEstimator):
            raise UsageError(f"KL estimator must be one of {', '.join(get_args(KLEstimator))}, got {self.estimator!r}")
        if self.clamp is not None and not self.clamp > 0:
            raise UsageError(f"KL clamp must be positive or null, got {self.clamp}")
        if self.importance and self.estimator not in ("k1", "k3"):
            raise UsageError(
                f"importance mends the gradient of an unbiased estimator, so it needs k1 or k3, got {self.estimator!r}"
            )

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None
    ) -> Tensor:
        """The estimate of each token, not yet multiplied by ``coef``, which may be steered.

        Args:
            logprobs: (B, T) log-probabilities of the actor, with gradient in the loss.
            ref_logprobs: (B, T) log-probabilities of the reference.
            mask: (B, T) bool.
            old_logprobs: (B, T) log-probabilities of the policy that drew the tokens; only with ``importance``.

        Returns:
            (B, T) nats, 0 where the mask is False.

        Raises:
            ValueError: ``importance`` without ``old_logprobs``.
        """
        # An infinity under the mask would give NaN gradients, even multiplied by 0: zeros replace such values.
        logprobs, ref_logprobs = (torch.where(mask, values, 0.0) for values in (logprobs, ref_logprobs))
        estimate = kl_estimate(logprobs, ref_logprobs, self.estimator, self.clamp)
        if not self.importance:
            return estimate
        if old_logprobs is None:
            raise UsageError("a KL term with importance needs old_logprobs, the log-probabilities at sampling time")
        return estimate * log_ratio_of(logprobs, torch.where(mask, old_logprobs, 0.0)).exp()


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the KL coefficient so that the measured KL approaches a target.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(responses / horizon, 1)).
    See "Fine-Tuning Language Models from Human Preferences", Ziegler et al. 2019, section 2.2.
    The last factor is theirs for batches within a horizon, and keeps larger ones from making the coefficient negative.

    Args:
        target: wanted KL to the reference, nats per response, positive.
        horizon: responses over which the coefficient changes by at most a fifth, positive.
    """

    target: float
    horizon: int = 10000

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise UsageError(f"target and horizon must be positive, got target={self.target}, horizon={self.horizon}")

    def __call__(self, coef: float, kl: float, num_responses: int) -> float:
        """The next coefficient.

        Args:
            coef: the present coefficient.
            kl: measured KL, nats per response.
            num_responses: responses it was measured on.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * min(num_responses / self.horizon, 1.0))
