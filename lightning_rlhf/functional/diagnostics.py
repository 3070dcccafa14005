"""Diagnostics of updates and of scores."""

import math

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import masked_centered, masked_mean
from lightning_rlhf.functional.mismatch import means_over_ranks, response_mean


def explained_variance(
    values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], ranks: DataRanks = ONE_RANK
) -> Tensor:
    """Fraction of the returns' variance that the critic explains: 1 - Var(returns - values) / Var(returns).

    1 is perfect, 0 is as good as a constant, negative is worse than a constant; NaN where the returns do not vary.

    Args:
        values: values of the critic.
        ranks: ranks that hold the other rows.
    """
    unexplained = masked_mean(masked_centered(returns - values, mask, ranks) ** 2, mask, ranks)
    total = masked_mean(masked_centered(returns, mask, ranks) ** 2, mask, ranks)
    return torch.where(total > 0, 1 - unexplained / total, torch.full_like(total, math.nan))


def gradient_power(
    advantages: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    sum_pi_squared: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    weights: Float[Tensor, "B T"] | None = None,
    ranks: DataRanks = ONE_RANK,
) -> dict[str, float]:
    """Expected squared size of one response's policy gradient with respect to the logits: signal and noise together.

    The power is the mean of w^2 A^2 W over responses, where A is the mean advantage of a response and w its mean
    weight. W = sum over its tokens of (1 - 2 pi + S) is the squared length of the gradient of its log-probability, with
    pi the probability of a token, and S the sum of the squared probabilities of the vocabulary. See "The Optimal Token
    Baseline", Li et al. 2026, section on variance.

    Args:
        logprobs: log-probabilities of the policy, nats.
        sum_pi_squared: sum over the vocabulary of the squared probabilities.
        mask: the tokens to learn from; responses without any do not count.
        weights: importance weights; None is 1.
        ranks: ranks that hold the other rows.

    Returns:
        ``variance/gradient_power``, and the means of its parts ``variance/advantage_squared_mean`` and
        ``variance/score_norm_mean``; NaN if no response counts.
    """
    norms = (1 - 2 * logprobs.exp() + sum_pi_squared).double().clamp(min=0)
    counts = mask.any(dim=1)
    score_norm = norms.masked_fill(~mask, 0).sum(dim=1)
    advantage_squared = response_mean(advantages, mask).double() ** 2
    weight_squared = torch.ones_like(score_norm) if weights is None else response_mean(weights, mask).double() ** 2
    parts = {
        "gradient_power": weight_squared * advantage_squared * score_norm,
        "advantage_squared_mean": advantage_squared,
        "score_norm_mean": score_norm,
    }
    means = means_over_ranks({name: (values, counts) for name, values in parts.items()}, ranks)
    return {f"variance/{name}": value for name, value in means.items()}


def ordered_fraction(better: Real[Tensor, "N"], worse: Real[Tensor, "M"]) -> float:
    """Fraction of (better, worse) pairs that a score orders correctly; ties count one half.

    It is the area under the ROC curve.

    Args:
        better: scores that should be higher.
        worse: scores that should be lower.

    Returns:
        A number in [0, 1]; NaN when either side is empty or a score is NaN.
    """
    if bool(better.isnan().any()) or bool(worse.isnan().any()):
        return math.nan
    higher, lower = better.unsqueeze(1), worse.unsqueeze(0)
    return ((higher > lower).double() + (higher == lower).double() / 2).mean().item()


def calibration_bins(difference: Float[Tensor, "N"], bins: int = 10) -> Tensor:
    """Sums over pairs grouped by the confidence of a score, from which :func:`calibration_error` is computed; additive.

    A score predicts that the preferred text of a pair is better with probability sigmoid(difference). The confidence
    in its order of the pair is sigmoid(|difference|).

    Args:
        difference: score of the preferred text less that of the other.
        bins: equal parts of [0.5, 1], at least 1.

    Returns:
        (3, bins) float64: for the pairs of each part, their number, the sum of the confidences, and the number of
        correctly ordered pairs; ties count one half. All NaN if a difference is NaN.
    """
    difference = difference.double()
    if bool(difference.isnan().any()):
        return difference.new_full((3, bins), math.nan)
    sure = difference.abs().sigmoid()
    right = (difference > 0).double() + (difference == 0).double() / 2
    number = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    totals = difference.new_zeros(3, bins)
    return totals.index_add(1, number, torch.stack([torch.ones_like(sure), sure, right]))


def calibration_error(bins: Tensor) -> float:
    """Expected calibration error: mean absolute gap between confidence and accuracy over pairs.

    ECE = sum over bins of n_b / N * |correct_b / n_b - confidence_b / n_b|.
    See "On Calibration of Modern Neural Networks", Guo et al. 2017, eq. 3.

    Args:
        bins: (3, bins) sums of :func:`calibration_bins`.

    Returns:
        A number in [0, 1]: 0 is perfect; NaN without pairs, or if a score was NaN.
    """
    count, sure, right = bins
    return float((right - sure).abs().sum() / count.sum())
