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


def wilson_interval(successes: float, trials: float, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval for a probability of which ``successes`` of ``trials`` were seen; it holds their share.

    The bounds stay in [0, 1]:

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    See "Probable Inference, the Law of Succession, and Statistical Inference", Wilson 1927.

    Args:
        successes: in [0, trials].
        trials: n, independent ones, positive.
        z: quantile of the normal distribution; the default covers 95 %.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: the counts do not fit together.
    """
    if not (0 <= successes <= trials and trials > 0):
        raise ValueError(f"an interval needs 0 <= successes <= trials and trials > 0, got {successes} of {trials}")
    share = successes / trials
    center = share + z**2 / (2 * trials)
    reach = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return min(share, max(0.0, (center - reach) / scale)), max(share, min(1.0, (center + reach) / scale))


def ordered_share(better: Tensor, worse: Tensor) -> float:
    """Share of (better, worse) pairs that a score orders rightly; ties count one half (the area under the ROC curve).

    Args:
        better: (N,) scores that should be higher.
        worse: (M,) scores that should be lower.

    Returns:
        A number in [0, 1]; NaN when either side is empty or a score is NaN.
    """
    if bool(better.isnan().any()) or bool(worse.isnan().any()):
        return math.nan
    higher, lower = better.unsqueeze(1), worse.unsqueeze(0)
    return ((higher > lower).double() + (higher == lower).double() / 2).mean().item()
