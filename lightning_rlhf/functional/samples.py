"""Statistics of the responses to prompts: the best, worst and most frequent of k, and means with intervals."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev
from typing import Any

_ROUNDING = 1e-9  # of differences that are equal
Z = 1.959964  # quantile of the normal distribution for intervals of 95 %


def draw_sizes(samples: int) -> list[int]:
    """Return the k of statistics of k samples: 1, 2, 4, ... below the number of samples, and that number.

    Args:
        samples: n, number of samples, at least 1.
    """
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def passes(correct: Sequence[bool], sizes: Sequence[int]) -> dict[str, float]:
    """Return ``pass@k`` of one prompt for each k.

    Args:
        correct: n samples, True for correct ones.
        sizes: each k, in [1, n].
    """
    return {f"pass@{k}": pass_at_k(len(correct), sum(correct), k) for k in sizes}


def extremes(rewards: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """Return ``best@k`` and ``worst@k`` of one prompt for each k.

    Args:
        rewards: n rewards.
        sizes: each k, in [1, n].
    """
    statistics = {}
    for k in sizes:
        statistics[f"best@{k}"] = best_at_k(rewards, k)
        statistics[f"worst@{k}"] = worst_at_k(rewards, k)
    return statistics


def majorities(answers: Sequence[Hashable], rewards: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """Return ``maj@k`` of one prompt for each k.

    Args:
        answers: n answers; None does not vote.
        rewards: n rewards of the same samples.
        sizes: each k, in [1, n].
    """
    return {f"maj@{k}": majority_at_k(answers, rewards, k) for k in sizes}


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


def wilson_interval(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """95 % interval for a probability after ``successes`` of ``trials``; it contains their fraction.

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
    fraction = successes / trials
    center = fraction + z**2 / (2 * trials)
    reach = z * math.sqrt(fraction * (1 - fraction) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return min(fraction, max(0.0, (center - reach) / scale)), max(fraction, min(1.0, (center + reach) / scale))


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


def mean_difference(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Compare two lists of values of the same prompts, prompt by prompt.

    Differences of one prompt vary less than the values of different prompts, so that the interval is narrower than
    those of the two means. See "Adding Error Bars to Evals", Miller 2024, section 4.

    Args:
        before: values of each prompt.
        after: other values of the same prompts, in the same order; their numbers may differ.

    Returns:
        ``mean`` over prompts of the difference of the means of a prompt's values, and the bounds ``low`` and ``high``
        of its 95 % interval, mean -+ 1.96 s / sqrt(m), where s is the standard deviation of the m differences. ``low``
        and ``high`` become None without two prompts that have values in both lists, and ``mean`` without any. If all
        values are in [0, 1], the bounds are in [-1, 1]; m equal differences then have the interval of m + 2, with half
        a difference of 1, half of -1 and one of 0 added. See "Simple improved confidence intervals for comparing
        matched proportions", Agresti and Min 2005.
    """
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
    changes = [fmean(new) - fmean(old) for old, new in pairs]
    if len(changes) < 2:
        return {"mean": changes[0] if changes else None, "low": None, "high": None}
    mean, count = fmean(changes), len(changes)
    reach = Z * stdev(changes) / math.sqrt(count)
    if not all(0 <= value <= 1 for pair in pairs for values in pair for value in values):
        return {"mean": mean, "low": mean - reach, "high": mean + reach}
    center = mean
    if reach < _ROUNDING:
        center = mean * count / (count + 2)
        reach = Z * math.sqrt(((mean**2 * count + 1) / (count + 2) - center**2) / (count + 2))
    return {"mean": mean, "low": min(mean, max(-1.0, center - reach)), "high": max(mean, min(1.0, center + reach))}


def number_or_nan(value: float | None) -> float:
    """Return a number as a float, and NaN for None."""
    return math.nan if value is None else float(value)
