"""Estimators of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL Divergence", 2020)."""

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimate, token by token, how far the policy is from the reference.

    With d = logprobs - ref_logprobs and tokens drawn from the policy:
        k1 = d                   unbiased, high variance, may be negative
        k2 = d^2 / 2             biased, low variance
        k3 = exp(-d) + d - 1     unbiased, low variance, never negative
        abs = |d|

    In k3, d is clamped at -20, so that a token the policy all but lost stays finite and is not pushed further down.

    Args:
        logprobs: (...) the policy's.
        ref_logprobs: (...) the reference's, the same shape.
        estimator: one of the four.

    Returns:
        (...) nats per token.

    Raises:
        ValueError: the estimator is none of the four.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        # expm1, because exp(-d) - 1 near d = 0 loses every digit and k3 falls below 0.
        log_ratio = (-difference).clamp(max=20)
        return torch.expm1(log_ratio) - log_ratio
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"KL estimator must be one of k1, k2, k3, abs, got {estimator!r}")
