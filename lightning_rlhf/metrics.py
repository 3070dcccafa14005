"""Metrics of the library as torchmetrics objects, for loops and modules of users as well."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.functional.diagnostics import calibration_bins, calibration_error
from lightning_rlhf.functional.samples import best_at_k, majority_at_k, pass_at_k, wilson_interval, worst_at_k


def over(ranks: DataRanks) -> dict[str, Any]:
    """Return arguments that make a metric reduce over the data ranks only.

    Without them, torchmetrics reduces over all processes and counts the rows of tensor-parallel ranks repeatedly.

    Args:
        ranks: ranks that hold the other rows, for example ``data_ranks`` of your module.
    """

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        return [row.view_as(value) for row in ranks.gather(value.reshape(1, -1))]

    return {"dist_sync_fn": gather, "distributed_available_fn": lambda: True}


class _PromptMean(Metric):
    """Mean over prompts of a statistic of each prompt's n samples; prompts with a NaN do not count."""

    full_state_update = False
    sums: Tensor

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__(**options)
        if k < 1:
            raise UsageError(f"{type(self).__name__} needs k >= 1, got k={k}")
        self.k = k
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")  # total, prompts

    def _add(self, statistics: Iterable[float]) -> None:
        values = self.sums.new_tensor(list(statistics))
        present = ~values.isnan()
        self.sums += torch.stack([values[present].sum(), present.sum()])

    def compute(self) -> Tensor:
        """Return () float64 the mean; NaN without prompts."""
        return self.sums[0] / self.sums[1]


class _RewardsAtK(_PromptMean):
    """Mean over prompts of a statistic of k of n rewards."""

    _statistic: Callable[[Sequence[float], int], float]

    def update(self, rewards: Tensor) -> None:
        """Add prompts.

        Args:
            rewards: (P, n) rewards of the n samples of each prompt, n >= k; a prompt with a NaN does not count.

        Raises:
            ValueError: there are fewer than k samples.
        """
        statistic = type(self)._statistic
        rows = rewards.double()
        self._add(statistic(row, self.k) for row in rows[~rows.isnan().any(dim=1)].tolist())


class PassAtK(_PromptMean):
    """Probability that at least one of k samples is correct, unbiased.

    You can add more than k samples per prompt. See :func:`~lightning_rlhf.functional.samples.pass_at_k`.

    Args:
        k: number of draws, at least 1.
        options: arguments of :class:`torchmetrics.Metric`.
    """

    def update(self, correct: Tensor) -> None:
        """Add prompts.

        Args:
            correct: (P, n) bool, the correct ones of the n samples of each prompt, n >= k.

        Raises:
            ValueError: there are fewer than k samples.
        """
        samples = correct.shape[1]
        self._add(pass_at_k(samples, count, self.k) for count in correct.bool().sum(dim=1).tolist())


class BestAtK(_RewardsAtK):
    """Reward of the best of k samples, unbiased: see :func:`~lightning_rlhf.functional.samples.best_at_k`.

    Args:
        k: number of draws, at least 1.
        options: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = True
    _statistic = staticmethod(best_at_k)


class WorstAtK(_RewardsAtK):
    """Reward of the worst of k samples, unbiased: see :func:`~lightning_rlhf.functional.samples.worst_at_k`.

    Args:
        k: number of draws, at least 1.
        options: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = True
    _statistic = staticmethod(worst_at_k)


class MajorityAtK(_PromptMean):
    """Reward of the most frequent answer of k samples, unbiased: what you get if you let the samples vote.

    See :func:`~lightning_rlhf.functional.samples.majority_at_k`.

    Args:
        k: number of draws, at least 1.
        options: arguments of :class:`torchmetrics.Metric`.
    """

    higher_is_better = True

    def update(self, answers: Sequence[Sequence[Hashable]], rewards: Tensor) -> None:
        """Add prompts.

        Args:
            answers: answers of the n samples of each of P prompts. None does not vote.
            rewards: (P, n) rewards of the samples, n >= k. A prompt with a NaN does not count.

        Raises:
            ValueError: numbers of answers and rewards differ, or there are fewer than k samples.
        """
        if len(answers) != len(rewards):
            raise UsageError(
                f"MajorityAtK needs answers and rewards of the same prompts, got {len(answers)} and {len(rewards)}"
            )
        rows = rewards.double()
        present = ~rows.isnan().any(dim=1)
        self._add(
            majority_at_k(answer, row, self.k)
            for answer, row, counts in zip(answers, rows.tolist(), present.tolist(), strict=True)
            if counts
        )


class PairAccuracy(Metric):
    """Fraction of preference pairs that a score orders correctly, with its 95 % interval (Wilson). Ties are wrong.

    Args:
        options: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    higher_is_better = True
    counts: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("counts", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")  # correct, pairs

    def update(self, difference: Tensor) -> None:
        """Add pairs.

        Args:
            difference: (N,) score of the preferred text minus the score of the other.
        """
        self.counts += torch.stack([(difference > 0).sum(), torch.tensor(difference.numel(), device=self.device)])

    def compute(self) -> dict[str, float]:
        """Return ``pairs``, ``accuracy``, and the bounds ``low`` and ``high`` of its interval. Without pairs, NaN."""
        correct, pairs = self.counts.tolist()
        if not pairs:
            return {"pairs": 0.0, "accuracy": torch.nan, "low": torch.nan, "high": torch.nan}
        low, high = wilson_interval(correct, pairs)
        return {"pairs": pairs, "accuracy": correct / pairs, "low": low, "high": high}


class PairCalibrationError(Metric):
    """Mean absolute gap between a score's confidence in its order of pairs and the fraction of correct orders.

    A score with an error of 0 is as often right as it is sure. See
    :func:`~lightning_rlhf.functional.diagnostics.calibration_error`.

    Args:
        bins: number of equal parts of the confidences [0.5, 1], at least 1.
        options: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    higher_is_better = False
    sums: Tensor

    def __init__(self, bins: int = 10, **options: Any) -> None:
        super().__init__(**options)
        if bins < 1:
            raise UsageError(f"PairCalibrationError needs bins >= 1, got bins={bins}")
        self.bins = bins
        self.add_state("sums", torch.zeros(3, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, difference: Tensor) -> None:
        """Add pairs.

        Args:
            difference: (N,) log-odds that the preferred text is the better one.
        """
        self.sums += calibration_bins(difference, self.bins)

    def compute(self) -> float:
        """Return the expected calibration error in [0, 1]. Without pairs, NaN."""
        return calibration_error(self.sums)
