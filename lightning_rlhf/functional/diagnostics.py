"""Diagnostics of updates, and quality metrics of sets of samples."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.masked import masked_centered, masked_mean
from lightning_rlhf.functional.mismatch import means_over_ranks, response_mean

Z = 1.959964  # quantile of the normal distribution for intervals of 95 %


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, ranks: DataRanks = ONE_RANK) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 - Var(returns - values) / Var(returns).

    1 is perfect, 0 is as good as a constant, negative is worse than a constant; NaN where the returns do not vary.

    Args:
        values: (B, T) the critic's values.
        returns: (B, T).
        mask: (B, T) bool.
        ranks: ranks that hold the other rows.
    """
    unexplained = masked_mean(masked_centered(returns - values, mask, ranks) ** 2, mask, ranks)
    total = masked_mean(masked_centered(returns, mask, ranks) ** 2, mask, ranks)
    return torch.where(total > 0, 1 - unexplained / total, torch.full_like(total, math.nan))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    See "Evaluating Large Language Models Trained on Code", Chen et al. 2021, eq. 1.

    Args:
        num_samples: n, samples drawn of one prompt.
        num_correct: c, number of correct samples, in [0, n].
        k: number of draws, in [1, n].

    Raises:
        ValueError: the three arguments are inconsistent.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={num_correct}, k={k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the reward of the best of k samples, from n samples.

    The mean of the maximum over all ways to draw k of the n without replacement: with the rewards in rising order,
    sum over i of x_(i) C(i - 1, k - 1) / C(n, k). Of rewards 0 and 1 it is :func:`pass_at_k`; it is k times the
    probability-weighted moment b_{k-1} of Landwehr, Matalas and Wallis 1979.

    Args:
        rewards: n rewards, any real numbers.
        k: number of draws, in [1, n].

    Raises:
        ValueError: k is out of range.
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f"best@k needs 1 <= k <= n, got n={len(rewards)}, k={k}")
    ways = math.comb(len(rewards), k)
    rising = list(enumerate(sorted(rewards)))[k - 1 :]  # the k - 1 smallest are never the largest of k
    return math.fsum(reward * (math.comb(below, k - 1) / ways) for below, reward in rising)


def worst_at_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the reward of the worst of k samples; see :func:`best_at_k`."""
    return -best_at_k([-reward for reward in rewards], k)


def majority_at_k(answers: Sequence[Hashable], rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the reward of the answer that most of k samples give, from n samples.

    The mean over all ways to draw k of the n without replacement, computed exactly by a dynamic program over the
    answers. Its state is the number of draws, the frequency of the most frequent answer, and the number of answers with
    that frequency; its value is the number of ways. Equally frequent answers win with equal probability. The reward of
    an answer is the mean reward of its samples. See "Self-Consistency Improves Chain of Thought Reasoning in Language
    Models", Wang et al. 2023.

    Args:
        answers: n answers; None does not vote, and wins only if none of the k samples votes.
        rewards: n rewards of the same samples, finite.
        k: number of draws, in [1, n].

    Raises:
        ValueError: the three arguments are inconsistent.
    """
    if not 1 <= k <= len(rewards) or len(answers) != len(rewards):
        raise ValueError(f"maj@k needs 1 <= k <= n, got {len(answers)} answers, {len(rewards)} rewards, k={k}")
    by_answer = defaultdict[Hashable, list[float]](list)
    for answer, reward in zip(answers, rewards, strict=True):
        by_answer[answer].append(reward)
    silent = by_answer.pop(None, [])
    left = len(rewards) - len(silent)
    # (draws, frequency of the most frequent answers, number of these answers): ways, and the sum of their rewards
    states: dict[tuple[int, int, int], tuple[int, float]] = {(0, 0, 0): (1, 0.0)}
    for own_rewards in by_answer.values():
        worth = math.fsum(own_rewards) / len(own_rewards)
        after = dict[tuple[int, int, int], tuple[int, float]]()
        left -= len(own_rewards)
        for (drawn, most, tied), (ways, total) in states.items():
            fewest = max(0, k - drawn - left - len(silent))  # else the remaining answers could not complete the draw
            for count in range(fewest, min(len(own_rewards), k - drawn) + 1):
                state, won = (drawn + count, most, tied), total
                if count > most:
                    state, won = (drawn + count, count, 1), ways * worth
                elif count == most > 0:
                    state, won = (drawn + count, most, tied + 1), total + ways * worth
                factor = math.comb(len(own_rewards), count)
                known = after.get(state, (0, 0.0))
                after[state] = known[0] + factor * ways, known[1] + factor * won
        states = after
    nothing = math.fsum(silent) / len(silent) if silent else 0.0
    return math.fsum(
        math.comb(len(silent), k - drawn) * (total / tied if tied else ways * nothing) / math.comb(len(rewards), k)
        for (drawn, _, tied), (ways, total) in states.items()
    )


def gradient_power(
    advantages: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    ranks: DataRanks = ONE_RANK,
) -> dict[str, float]:
    """Expected squared size of one response's policy gradient with respect to the logits: signal and noise together.

    With pi the probability of a token, W = sum over tokens of 1 - 2 pi + sum over the vocabulary of pi^2, which is the
    squared length of the gradient of the log-probability, A the mean advantage of a response and w its mean weight:
    power = mean of w^2 A^2 W over responses. See "The Optimal Token Baseline", Li et al. 2026, section on variance.

    Args:
        advantages: (B, T).
        logprobs: (B, T) the policy's, nats.
        sum_pi_squared: (B, T) sum over the vocabulary of the squared probabilities.
        mask: (B, T) bool, the tokens to learn from; responses without any do not count.
        weights: (B, T) importance weights; None is 1.
        ranks: ranks that hold the other rows.

    Returns:
        ``variance/...`` to a number, NaN where no response counts.
    """
    norms = (1 - 2 * logprobs.exp() + sum_pi_squared).double().clamp(min=0)
    rows = mask.any(dim=1)
    norm, squared = norms.masked_fill(~mask, 0).sum(dim=1), response_mean(advantages, mask).double() ** 2
    scale = torch.ones_like(norm) if weights is None else response_mean(weights, mask).double() ** 2
    parts = {"gradient_power": scale * squared * norm, "advantage_squared_mean": squared, "score_norm_mean": norm}
    means = means_over_ranks({name: (values, rows) for name, values in parts.items()}, ranks)
    return {f"variance/{name}": value for name, value in means.items()}


def wilson_interval(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """95 % interval for a probability after ``successes`` of ``trials``; it contains their share.

    The bounds stay in [0, 1]:

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    See "Probable Inference, the Law of Succession, and Statistical Inference", Wilson 1927.

    Args:
        successes: number of successes, in [0, trials].
        trials: n, number of independent trials, positive.
        z: quantile of the normal distribution; the default covers 95 %.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: the counts are inconsistent.
    """
    if not (0 <= successes <= trials and trials > 0):
        raise ValueError(f"an interval needs 0 <= successes <= trials and trials > 0, got {successes} of {trials}")
    share = successes / trials
    center = share + z**2 / (2 * trials)
    reach = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return min(share, max(0.0, (center - reach) / scale)), max(share, min(1.0, (center + reach) / scale))


def mean_interval(samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Estimate the mean over prompts of the mean over a prompt's samples, with a 95 % interval.

    Prompts are independent draws, the samples of one prompt are not: more samples of few prompts do not make the
    interval narrower than the variance between prompts allows. For values in [0, 1] the interval is Wilson's, with the
    number of trials that would have the observed variance between prompts,

    n = p (1 - p) / (s^2 / m), at least the number m of prompts,

    where s^2 is the mean squared distance of the prompts' means from p. If all values are 0 or 1, n is at most the
    number of samples; for one value per prompt that is Wilson's interval of m trials. Otherwise s^2 is the sum of the
    squared distances divided by m - 1, and n may be larger, because values between 0 and 1 vary less than 0 and 1. For
    values outside of [0, 1] it is the normal interval, mean -+ 1.96 s / sqrt(m), with the latter s^2. See "Comparative
    Study of Confidence Intervals for Proportions in Complex Sample Surveys", Franco et al. 2019, on effective sample
    sizes, and "Adding Error Bars to Evals", Miller 2024, on prompts as clusters.

    Args:
        samples: values of each prompt, at least one.

    Returns:
        ``mean``, ``low``, ``high`` and the name of the ``interval``; ``low`` and ``high`` may be None.
    """
    means = [math.fsum(values) / len(values) for values in samples]
    prompts = len(samples)
    mean = math.fsum(means) / prompts
    squares = math.fsum((value - mean) ** 2 for value in means)
    if all(0 <= value <= 1 for values in samples for value in values):
        most = sum(len(values) for values in samples)
        is_binary = all(value in (0, 1) for values in samples for value in values)
        trials: float = prompts if mean in (0, 1) else most
        if squares > 0:
            variance = squares / prompts / (prompts if is_binary else prompts - 1)
            trials = mean * (1 - mean) / variance
            trials = max(prompts, min(trials, most) if is_binary else trials)
        low, high = wilson_interval(mean * trials, trials)
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    if prompts < 2:
        return {"mean": mean, "low": None, "high": None, "interval": "none"}
    reach = Z * math.sqrt(squares / (prompts - 1) / prompts)
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "interval": "normal"}


def ordered_share(better: Tensor, worse: Tensor) -> float:
    """Share of (better, worse) pairs that a score orders correctly; ties count one half (the area under the ROC curve).

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


def calibration_bins(difference: Tensor, bins: int = 10) -> Tensor:
    """Sums over pairs grouped by the confidence of a score, from which :func:`calibration_error` is computed; additive.

    A score predicts that the preferred text of a pair is better with probability sigmoid(difference). The confidence
    in its order of the pair is sigmoid(|difference|).

    Args:
        difference: (N,) score of the preferred text less that of the other.
        bins: equal parts of [0.5, 1], at least 1.

    Returns:
        (3, bins) float64: for the pairs of each part, their number, the sum of the confidences, and the number of
        correctly ordered pairs; ties count one half.
    """
    difference = difference.double()
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
        A number in [0, 1]: 0 is perfect; NaN without pairs.
    """
    count, sure, right = bins
    return float((right - sure).abs().sum() / count.sum())
