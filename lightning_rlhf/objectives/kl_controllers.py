"""KL penalty of the actor against the reference, in the reward or in the loss, and the control of its coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.kl import KLEstimator, kl_estimate
from lightning_rlhf.objectives.base import log_ratio_of
from lightning_rlhf.ranges import check_range


@dataclass(frozen=True)
class KLTerm:
    """A KL penalty against the reference.

    Every KL to the reference costs a forward pass over the responses, with LoRA too. In the loss, it moves the actor a
    little even if all rewards are equal, because Adam scales a tiny gradient up to a full step: 0.17 nats per response
    after eight updates of a tiny model at 2e-4.

    Args:
        coef: weight of the penalty, at least 0. 0 switches it off.
        estimator: see :func:`lightning_rlhf.functional.kl.kl_estimate`. In the reward, k1 and k3 are unbiased. In the
            loss, k2, k3+, k1+ and abs+ give the gradient of KL(actor || ref), k3 gives the gradient of KL(ref ||
            actor), and the gradient of k1 is zero in expectation.
        clamp: largest absolute value of a token's estimate, nats, positive. None does not clamp.
        importance: whether each estimate is multiplied by the ratio actor / old actor, with gradient. Value and
            gradient of k1 and k3 then equal KL(actor || ref) in expectation over tokens of the old actor, however far
            the actor has moved ("DeepSeek-V3.2", DeepSeek-AI 2025, section 3.1). It changes only the loss, because in
            the reward the ratio is 1.
    """

    coef: float = 0.0
    estimator: KLEstimator = "k1"
    clamp: float | None = None
    importance: bool = False

    def __post_init__(self) -> None:
        check_range("KL coef", self.coef, "at least 0")
        if self.estimator not in get_args(KLEstimator):
            raise UsageError(f"KL estimator must be one of {', '.join(get_args(KLEstimator))}, got {self.estimator!r}")
        check_range("KL clamp", self.clamp, "positive or null")
        if self.importance and self.estimator not in ("k1", "k3"):
            raise UsageError(
                f"importance corrects the gradient of an unbiased estimator: use k1 or k3, got {self.estimator!r}"
            )

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        ref_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        old_logprobs: Float[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T"]:
        """Return the KL estimate of each token, without the coefficient, which a callback may control.

        Args:
            logprobs: log-probabilities of the actor, with gradient in the loss.
            ref_logprobs: log-probabilities of the reference.
            old_logprobs: log-probabilities of the actor that sampled the tokens; needed with ``importance``.

        Returns:
            Nats, 0 where the mask is False.

        Raises:
            ValueError: ``importance`` without ``old_logprobs``.
        """
        # Infinity outside of the mask would give NaN gradients, because infinity times 0 is NaN.
        logprobs, ref_logprobs = (torch.where(mask, values, 0.0) for values in (logprobs, ref_logprobs))
        estimate = kl_estimate(logprobs, ref_logprobs, self.estimator, self.clamp)
        if not self.importance:
            return estimate
        if old_logprobs is None:
            raise UsageError("a KL term with importance needs old_logprobs, the log-probabilities at sampling time")
        return estimate * log_ratio_of(logprobs, torch.where(mask, old_logprobs, 0.0)).exp()


@dataclass(frozen=True)
class AdaptiveKL:
    """Changes the KL coefficient so that the measured KL approaches your target.

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(responses / horizon, 1))

    See "Fine-Tuning Language Models from Human Preferences", Ziegler et al. 2019, section 2.2. The paper's last factor
    is responses / horizon. We take the minimum, because a batch larger than the horizon could otherwise make the
    coefficient negative.

    Args:
        target: target of KL(actor || ref), nats per response, positive.
        horizon: number of responses over which the coefficient changes by at most 20 %, positive.
    """

    target: float
    horizon: int = 10000

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise UsageError(f"target and horizon must be positive, got target={self.target}, horizon={self.horizon}")

    def __call__(self, coef: float, kl: float, num_responses: int) -> float:
        """Return the coefficient of the next step.

        Args:
            coef: coefficient of this step.
            kl: measured KL, nats per response.
            num_responses: number of responses of the measurement.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * min(num_responses / self.horizon, 1.0))
