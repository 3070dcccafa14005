"""Estimators of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL Divergence", 2020)."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


def kl_estimate(
    logprobs: Float[Tensor, "..."],
    ref_logprobs: Float[Tensor, "..."],
    estimator: KLEstimator = "k1",
    clamp: float | None = None,
) -> Float[Tensor, "..."]:
    """Estimate the KL of each token between policy and reference.

    With d = logprobs - ref_logprobs and tokens drawn from the policy:
        k1 = d                   unbiased, high variance, may be negative
        k2 = d^2 / 2             biased, low variance
        k3 = exp(-d) + d - 1     unbiased, low variance, never negative
        abs = |d|
        k1+, k3+, abs+           the value of k1, k3, abs with the gradient of k2

    In k3, d is clamped at -20, so that a token with almost no probability has a finite value and is not pushed further
    down.

    In a loss only the gradient matters, and an unbiased value does not imply an unbiased gradient. Over samples of the
    policy, the expected gradient of k1, grad log p, is 0, and that of k3 belongs to KL(reference || policy); that of
    k2, d grad log p, belongs to KL(policy || reference). So k2 and the forms with a plus have unbiased gradients: value
    = sg(base - k2) + k2. See "Rethinking KL Regularization in RLHF", Liu et al. 2025.

    Args:
        logprobs: log-probabilities of the policy.
        ref_logprobs: log-probabilities of the reference, of the same shape.
        estimator: one of the seven.
        clamp: largest absolute value of an estimate, nats, positive; None does not clamp. Clamped estimates are too
            small, and the forms without a plus have no gradient there.

    Returns:
        Nats per token.

    Raises:
        ValueError: the estimator is not one of the seven.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"KL estimator must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}")
    difference = logprobs - ref_logprobs
    value = _value(difference, estimator.removesuffix("+"))
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if not estimator.endswith("+"):
        return value
    slope = difference.detach()
    # Not base - k2 + k2, where a large k2 would round the base away.
    return value.detach() + slope * (difference - slope)


def _value(difference: Tensor, base: str) -> Tensor:
    if base == "k1":
        return difference
    if base == "k2":
        return difference**2 / 2
    if base == "k3":
        # expm1, because exp(-d) - 1 near d = 0 loses every digit and k3 falls below 0.
        log_ratio = (-difference).clamp(max=20)
        return torch.expm1(log_ratio) - log_ratio
    return difference.abs()
