"""Metrics of the difference between trained policy and rollout policy, caused by kernels, precision and staleness.

They contain every policy token, before truncation and rejection, and are exact over ranks.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import masked_sum

LOG_BOUND = 20.0  # exp(20) is 5e8; a larger ratio of one token would hide the rest of the batch


def train_rollout_log_ratio(
    logprobs: Float[Tensor, "B T"], rollout_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Tensor:
    """Log of train / rollout of each token in float64, clamped to [-20, 20]; 0 where the mask is False.

    Args:
        logprobs: the trained policy's.
        rollout_logprobs: log-probabilities of the engine at sampling time.
    """
    log_ratio = (logprobs.detach().double() - rollout_logprobs.detach().double()).clamp(-LOG_BOUND, LOG_BOUND)
    return log_ratio.masked_fill(~mask, 0)


def response_mean(values: Tensor, mask: Tensor) -> Float[Tensor, "B"]:
    """Mean over the tokens of each response, 0 for one without any."""
    return values.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def means_over_ranks(parts: Mapping[str, tuple[Tensor, Tensor]], ranks: DataRanks) -> dict[str, float]:
    """Mean of each tensor over its mask and all ranks, in one reduction; NaN where nothing counts.

    Args:
        parts: names to values (...) and bool mask (...).
        ranks: ranks that hold the other rows.
    """
    pairs = [torch.stack([masked_sum(values.double(), mask), mask.sum().double()]) for values, mask in parts.values()]
    totals = ranks.sum(torch.stack(pairs))
    return dict(zip(parts, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))


def maxima_over_ranks(parts: Mapping[str, tuple[Tensor, Tensor]], ranks: DataRanks) -> dict[str, float]:
    """Largest of each tensor over its mask and all ranks, in one reduction; NaN where nothing counts.

    Args:
        parts: names to values (...) and bool mask (...).
        ranks: ranks that hold the other rows.
    """
    largest = []
    for values, mask in parts.values():
        masked = values.double().masked_fill(~mask, -torch.inf)
        largest.append(torch.cat([masked.flatten(), masked.new_full((1,), -torch.inf)]).max())
    pairs = zip(parts, ranks.max(torch.stack(largest)).tolist(), strict=True)
    return {name: torch.nan if value == -torch.inf else value for name, value in pairs}


def spread_metrics(parts: Mapping[str, tuple[Tensor, Tensor]], ranks: DataRanks) -> dict[str, float]:
    """``_mean``, ``_std``, ``_max`` and ``_min`` of each tensor over its mask and all ranks.

    The standard deviation is that of the batch (divisor n), in two passes: E[x^2] - E[x]^2 loses every digit.

    Args:
        parts: names to values (...) and bool mask (...).
        ranks: ranks that hold the other rows.
    """
    means = means_over_ranks(parts, ranks)
    squares = {name: ((values.double() - means[name]) ** 2, mask) for name, (values, mask) in parts.items()}
    metrics = {f"{name}_mean": value for name, value in means.items()}
    metrics |= {f"{name}_std": value**0.5 for name, value in means_over_ranks(squares, ranks).items()}
    ends = {f"{name}_max": part for name, part in parts.items()}
    ends |= {f"{name}_min": (-values, mask) for name, (values, mask) in parts.items()}
    largest = maxima_over_ranks(ends, ranks)
    return metrics | {name: -value if name.endswith("_min") else value for name, value in largest.items()}


def effective_fraction(mean: float, deviation: float) -> float:
    """Effective sample size as a fraction of the samples, mean(w)^2 / mean(w^2); 0 if all weights are 0.

    See "Monte Carlo theory, methods and examples", Owen 2013, eq. 9.13.

    Args:
        mean: mean of the weights.
        deviation: their standard deviation (divisor n).
    """
    square = mean**2 + deviation**2
    return mean**2 / square if square != 0 else 0.0


def mismatch_metrics(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    ranks: DataRanks = ONE_RANK,
) -> dict[str, float]:
    """Divergence, perplexities and spread of the ratio between trained policy and rollout policy.

    With l = log(train / rollout) of a token, clamped to [-20, 20], r = exp(l), R the product of r over a response
    (its logarithm clamped in the same way), n samples:
        kl_k1 = mean(-l), kl_k3 = mean(r - 1 - l)       estimates of KL(rollout || train), nats per token
        chi2_token = mean(r^2) - 1, chi2_sequence = mean(R^2) - 1
        ess_token = mean(r)^2 / mean(r^2), ess_sequence the same of R: as a fraction of the samples, in (0, 1]
        log_ppl_train, log_ppl_rollout                  mean over responses of the mean of -logprobs over tokens
        ppl_train, ppl_rollout, ppl_ratio               mean over responses of the exponentials; ratio train / rollout
        log_ppl_diff                                    mean of -l of each response; _abs_mean is of absolute values
        ratio, sequence_ratio, prob_diff                r, R, abs(difference of the probabilities)
        prob_correlation                                Pearson's, of the two probabilities of each token

    Args:
        logprobs: the trained policy's before the first update.
        rollout_logprobs: log-probabilities of the engine at sampling time.
        mask: policy tokens, before any rejection.
        ranks: ranks that hold the other rows.

    Returns:
        ``rollout_corr/<name>`` to a number, NaN where no token counts.
    """
    log_ratio = train_rollout_log_ratio(logprobs, rollout_logprobs, mask)
    rows = mask.any(dim=1)
    of_response = log_ratio.sum(dim=1).clamp(-LOG_BOUND, LOG_BOUND)
    difference = -response_mean(log_ratio, mask)
    train, rollout = (values.detach().double() for values in (logprobs, rollout_logprobs))
    log_ppl = {"train": -response_mean(train, mask), "rollout": -response_mean(rollout, mask)}
    means = {
        "kl_k1": (-log_ratio, mask),
        "kl_k3": (torch.expm1(log_ratio) - log_ratio, mask),
        "chi2_token": (torch.expm1(2 * log_ratio), mask),
        "chi2_sequence": (torch.expm1(2 * of_response), rows),
        "log_ppl_diff_abs_mean": (difference.abs(), rows),
        "ppl_ratio": (difference.exp(), rows),
    }
    for whose, values in log_ppl.items():
        means[f"log_ppl_{whose}"] = (values, rows)
        means[f"ppl_{whose}"] = (values.clamp(max=LOG_BOUND).exp(), rows)
    spreads = {
        "ratio": (log_ratio.exp(), mask),
        "sequence_ratio": (of_response.exp(), rows),
        "log_ppl_diff": (difference, rows),
        "prob_diff": ((train.exp() - rollout.exp()).abs(), mask),
    }
    metrics = means_over_ranks(means, ranks) | spread_metrics(spreads, ranks)
    for name, ratio in (("ess_token", "ratio"), ("ess_sequence", "sequence_ratio")):
        metrics[name] = effective_fraction(metrics[f"{ratio}_mean"], metrics[f"{ratio}_std"])
    metrics["prob_correlation"] = _correlation(train.exp(), rollout.exp(), mask, ranks)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _correlation(first: Tensor, second: Tensor, mask: Tensor, ranks: DataRanks) -> float:
    """Pearson's correlation over the mask and all ranks; NaN where either does not vary."""
    means = means_over_ranks({"first": (first, mask), "second": (second, mask)}, ranks)
    x, y = first - means["first"], second - means["second"]
    products = means_over_ranks({"xy": (x * y, mask), "xx": (x * x, mask), "yy": (y * y, mask)}, ranks)
    if not min(products["xx"], products["yy"]) > 1e-24:  # probabilities that differ only by rounding
        return torch.nan
    return float(products["xy"] / (products["xx"] * products["yy"]) ** 0.5)
