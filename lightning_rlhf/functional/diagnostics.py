"""Numbers that tell whether an update is healthy, and how good a set of samples is."""

import math

import torch
from torch import Tensor

from lightning_rlhf.functional.masked import SumOverRanks, masked_centered, masked_mean, this_rank_only


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: SumOverRanks = this_rank_only) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 - Var(returns - values) / Var(returns).

    1 is perfect, 0 is as good as a constant, negative is worse than a constant; NaN where the returns do not vary.

    Args:
        values: (B, T) the critic's values.
        returns: (B, T).
        mask: (B, T) bool.
        reduce: sums a tensor over ranks.
    """
    unexplained = masked_mean(masked_centered(returns - values, mask, reduce) ** 2, mask, reduce)
    total = masked_mean(masked_centered(returns, mask, reduce) ** 2, mask, reduce)
    return torch.where(total > 0, 1 - unexplained / total, torch.full_like(total, math.nan))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    See "Evaluating Large Language Models Trained on Code", Chen et al. 2021, eq. 1.

    Args:
        num_samples: n, samples drawn of one prompt.
        num_correct: c, how many of them are correct, in [0, n].
        k: in [1, n].

    Raises:
        ValueError: the three do not fit together.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={num_correct}, k={k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ordered_share(better: Tensor, worse: Tensor) -> float:
    """Share of (better, worse) pairs that a score orders rightly; ties count one half (the area under the ROC curve).

    Args:
        better: (N,) scores that should be higher.
        worse: (M,) scores that should be lower.

    Returns:
        A number in [0, 1]; NaN when either side is empty.
    """
    difference = better.double().unsqueeze(1) - worse.double().unsqueeze(0)
    return ((difference > 0).double() + (difference == 0).double() / 2).mean().item()
