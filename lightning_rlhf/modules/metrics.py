"""Metrics of a step, exact over micro-batches and ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.diagnostics import explained_variance
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.mismatch import maxima_over_ranks, means_over_ranks
from lightning_rlhf.types import Experience

_APPROX_KL = "kl/approx"
_REJECTED = "rollout_corr/rejected_fraction"
_OF_GROUPS_OF_TWO = ("group/equal_reward_fraction", "group/reward_std_mean")
_Masked = dict[str, tuple[Tensor, Tensor]]  # name to values and the mask of those that count


class MeanAccumulator:
    """Running means by name, whose sums and counts are added separately until :meth:`means`."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # (2,) float64: sum and count

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to a mean.

        Args:
            name: name of the metric.
            values: values of any shape.
            mask: bool of the same shape, True for values that count; None counts all.
        """
        values = values.detach().double()
        # values[mask] would make the host wait for a GPU, to learn how many there are.
        count = values.new_full((), values.numel()) if mask is None else mask.sum().double()
        total = (values if mask is None else values.masked_fill(~mask, 0)).sum()
        self._add_total(name, torch.stack([total, count]))

    def add_approx_kl(self, values: Tensor, mask: Tensor) -> None:
        """Add to KL(old || new) of the policy, which ``target_kl`` bounds; it is logged as ``kl/approx``.

        Args:
            values: (B, T) KL of each token, nats.
            mask: (B, T) bool, the tokens that count.
        """
        self.add(_APPROX_KL, values, mask)

    def approx_kl(self, ranks: DataRanks) -> float | None:
        """Return the mean KL(old || new) over all ranks; None where none was added. All ranks."""
        return self._mean(_APPROX_KL, ranks)

    def add_rejected(self, accepted: Tensor, mask: Tensor) -> None:
        """Add to the fraction of tokens that a policy loss rejects; logged as ``rollout_corr/rejected_fraction``.

        Args:
            accepted: (B, T) bool, False for rejected tokens.
            mask: (B, T) bool, the tokens that count.
        """
        self.add(_REJECTED, ~accepted, mask)

    def all_rejected(self, ranks: DataRanks) -> bool:
        """Check whether tokens were added with :meth:`add_rejected`, and all rejected on all ranks. All ranks."""
        return self._mean(_REJECTED, ranks) == 1.0

    def merge(self, other: MeanAccumulator) -> None:
        """Add the sums and counts of another accumulator."""
        for name, total in other._totals.items():
            self._add_total(name, total)

    def means(self, ranks: DataRanks) -> dict[str, float]:
        """Return the means over all ranks, in one reduction; a mean without values is NaN. All ranks."""
        if not self._totals:
            return {}
        totals = ranks.sum(torch.stack(list(self._totals.values())))
        # NaN rather than left out: the logger would repeat its last value.
        return dict(zip(self._totals, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))

    def _mean(self, name: str, ranks: DataRanks) -> float | None:
        if name not in self._totals:
            return None
        total, count = ranks.sum(self._totals[name]).tolist()
        return total / count if count else math.nan

    def _add_total(self, name: str, total: Tensor) -> None:
        self._totals[name] = self._totals[name] + total if name in self._totals else total


@dataclass(frozen=True)
class UpdateResult:
    """The result of one optimizer step.

    Attributes:
        grad_norm: () norm of the role's gradient before clipping.
        means: metrics of this rank's rows.
        stepped: whether the weights were updated; False where every token was rejected.
    """

    grad_norm: Tensor
    means: MeanAccumulator
    stepped: bool = True


@dataclass
class StepUpdates:
    """Optimizer steps of all roles in a training step.

    Attributes:
        means: metrics of this rank's rows, and the norm of each role's gradients.
        counts: number of optimizer steps of each role.
    """

    means: MeanAccumulator = field(default_factory=MeanAccumulator)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, results: Mapping[str, UpdateResult]) -> None:
        """Add the updates on one mini-batch, by role."""
        for role, result in results.items():
            self.means.merge(result.means)
            if result.stepped:
                self.means.add(f"grad_norm/{role}", result.grad_norm)
                self.counts[role] += 1


def describe(experience: Experience, roles: Collection[str], ranks: DataRanks = ONE_RANK) -> dict[str, float]:
    """Compute the metrics of one rollout over all ranks; ``docs/metrics.md`` defines each.

    Metrics of a role are left out where the role does not exist, and differences between the responses to a prompt
    where no prompt has two: 0 would look like a measurement.

    Args:
        experience: rows of this rank.
        roles: names of the roles that exist.
        ranks: ranks that hold the other rows.
    """
    rollout = experience.rollout
    ranges = _ranges(experience, roles)
    averages = _averages(experience, roles) | _group_averages(experience)
    tokens = experience.total_lengths.sum().view(1)
    ranges["perf/rank_tokens_"] = (tokens, torch.ones_like(tokens, dtype=torch.bool))
    gap = (experience.old_logprobs - rollout.rollout_logprobs).abs()
    maxima, minima = _Masked(), _Masked()
    for name, (values, mask) in ranges.items():
        averages[f"{name}mean"] = (values, mask)
        maxima[f"{name}max"] = (values, mask)
        minima[f"{name}min"] = (-values, mask)
    sampled = rollout.response_mask & rollout.sampled_rows.unsqueeze(1)
    averages["rollout/logprob_diff_mean"] = (gap, sampled)
    maxima["rollout/logprob_diff_max"] = (gap, sampled)
    metrics = means_over_ranks(averages, ranks)
    extremes = maxima_over_ranks(maxima | minima, ranks)
    metrics |= {name: 0.0 - value if name in minima else value for name, value in extremes.items()}
    metrics |= _standard_deviations(experience, metrics, ranks)
    if "critic" in roles:
        explained = explained_variance(experience.values, experience.returns, experience.mask, ranks)
        metrics["value/explained_variance"] = explained.item()
    metrics["rollout/response_tokens"] = ranks.sum(rollout.sampled_lengths.sum()).item()
    if math.isnan(metrics["group/equal_reward_fraction"]):
        metrics = {name: value for name, value in metrics.items() if name not in _OF_GROUPS_OF_TWO}
    return metrics


def _standard_deviations(experience: Experience, means: dict[str, float], ranks: DataRanks) -> dict[str, float]:
    """Compute the standard deviation of each reward (divisor n) around its mean over all ranks."""
    reward = experience.reward.double()
    squares = {"reward/std": ((reward - means["reward/mean"]) ** 2, experience.rewarded_rows)}
    for name, values in experience.rollout.rewards.items():
        squares[f"reward/{name}_std"] = ((values.double() - means[f"reward/{name}"]) ** 2, ~values.isnan())
    return {name: variance**0.5 for name, variance in means_over_ranks(squares, ranks).items()}


def _ranges(experience: Experience, roles: Collection[str]) -> _Masked:
    """Return the values that are logged by mean, largest and smallest."""
    rollout = experience.rollout
    every, rewarded = rollout.sampled_rows, experience.rewarded_rows
    rewarded_tokens = experience.mask & rewarded.unsqueeze(1)
    values = {
        "reward/": (experience.reward, rewarded),
        "advantage/": (experience.advantages, rewarded_tokens),
        "return/": (experience.returns, rewarded_tokens),
        "rollout/response_tokens_": (rollout.sampled_lengths, every),
        "rollout/finished_tokens_": (rollout.sampled_lengths, every & ~rollout.truncated),
        "rollout/prompt_tokens_": (rollout.prompt_lengths, every),
    }
    if "critic" in roles:
        values["value/"] = (experience.values, rollout.response_mask)
    if "ref" in roles:
        penalized = experience.token_rewards.masked_fill(~rollout.response_mask, 0).sum(dim=1)
        values["reward/after_kl_"] = (penalized, rewarded)
    return values


def _averages(experience: Experience, roles: Collection[str]) -> _Masked:
    """Return the values that are logged by their mean alone."""
    rollout = experience.rollout
    every = rollout.sampled_rows
    values = {
        "rollout/truncated_fraction": (rollout.truncated, every),
        "reward/missing_fraction": (experience.reward.isnan(), every),
    }
    values |= {f"reward/{name}": (rewards, ~rewards.isnan()) for name, rewards in rollout.rewards.items()}
    if (allowed := rollout.allowed) is not None:
        values["rollout/allowed_tokens_mean"] = (allowed.counts, allowed.counts > 0)
        values["rollout/added_token_fraction"] = (allowed.added, allowed.counts > 0)
    if "ref" in roles:
        kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, "k1")
        values["kl/ref"] = (kl.masked_fill(~rollout.response_mask, 0).sum(dim=1), every)
    if "reward_model" in roles:
        values["reward/from_model"] = (experience.reward - rollout.reward.nan_to_num(0.0), every)
    return values


def _group_averages(experience: Experience) -> _Masked:
    """Return one value per prompt with rewarded responses; all responses of a group are on one rank."""
    rewarded = experience.rewarded_rows
    reward = experience.reward[rewarded].double()
    _, group, sizes = experience.rollout.group[rewarded].unique(return_inverse=True, return_counts=True)
    zeros, several = reward.new_zeros(len(sizes)), sizes > 1
    low = zeros.scatter_reduce(0, group, reward, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, reward, "amax", include_self=False)
    mean = zeros.index_add(0, group, reward) / sizes
    squares = zeros.index_add(0, group, (reward - mean[group]) ** 2)
    return {
        "group/single_fraction": (~several, torch.ones_like(several)),
        "group/equal_reward_fraction": (low == high, several),
        "group/reward_std_mean": ((squares / (sizes - 1).clamp(min=1)).sqrt(), several),
    }
