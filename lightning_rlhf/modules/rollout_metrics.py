"""What a step's metrics say of the experience it learnt from."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from lightning_rlhf.functional.diagnostics import explained_variance
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.functional.mismatch import maxima_over_ranks, means_over_ranks
from lightning_rlhf.types import Experience

Parts = dict[str, tuple[Tensor, Tensor]]  # names to values and which of them count


def describe(
    experience: Experience,
    roles: Collection[str],
    reduce: Callable[[Tensor], Tensor],
    reduce_max: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Metrics of one rollout, over all ranks; :mod:`~lightning_rlhf.metric_names` says what each is.

    What a role makes is left out where there is no such role: 0 would read as measured. What looks at the differences
    between the responses to a prompt is left out where no prompt has two.

    Args:
        experience: of this step.
        roles: names of the models that there are.
        reduce: sums a tensor over ranks.
        reduce_max: takes the elementwise maximum over ranks.
    """
    rollout, reward = experience.rollout, experience.reward
    ranges, averages = _of_tokens(experience, roles), _of_responses(experience, roles) | _of_groups(experience)
    on_rank = experience.total_lengths.sum().view(1)
    ranges["perf/rank_tokens_"] = (on_rank, torch.ones_like(on_rank, dtype=torch.bool))
    averages |= {f"{name}mean": part for name, part in ranges.items()}
    ends = {f"{name}max": part for name, part in ranges.items()}
    ends |= {f"{name}min": (-values, counts) for name, (values, counts) in ranges.items()}
    gap = (experience.old_logprobs - rollout.rollout_logprobs).abs()
    averages["rollout/logprob_diff_mean"] = ends["rollout/logprob_diff_max"] = (gap, rollout.response_mask)
    metrics = means_over_ranks(averages, reduce)
    extremes = maxima_over_ranks(ends, reduce_max)
    metrics |= {name: -value if name.endswith("min") else value for name, value in extremes.items()}
    squares = {"reward/std": ((reward.double() - metrics["reward/mean"]) ** 2, torch.ones_like(rollout.truncated))}
    for name, values in rollout.rewards.items():
        squares[f"reward/{name}_std"] = ((values.double() - metrics[f"reward/{name}"]) ** 2, ~values.isnan())
    metrics |= {name: variance**0.5 for name, variance in means_over_ranks(squares, reduce).items()}
    if "critic" in roles:
        explained = explained_variance(experience.values, experience.returns, experience.mask, reduce)
        metrics["value/explained_variance"] = explained.item()
    metrics["rollout/response_tokens"] = reduce(rollout.response_lengths.sum()).item()
    alone = math.isnan(metrics["group/equal_reward_fraction"])
    return {name: value for name, value in metrics.items() if not (alone and name in _OF_SEVERAL)}


_OF_SEVERAL = ("group/equal_reward_fraction", "group/reward_std_mean")


def _of_tokens(experience: Experience, roles: Collection[str]) -> Parts:
    """What is told by mean, largest and smallest."""
    rollout = experience.rollout
    every = torch.ones_like(rollout.truncated)
    parts = {
        "reward/": (experience.reward, every),
        "advantage/": (experience.advantages, experience.mask),
        "return/": (experience.returns, experience.mask),
        "rollout/response_tokens_": (rollout.response_lengths, every),
        "rollout/finished_tokens_": (rollout.response_lengths, ~rollout.truncated),
        "rollout/prompt_tokens_": (rollout.prompt_lengths, every),
    }
    if "critic" in roles:
        parts["value/"] = (experience.values, rollout.response_mask)
    if "ref" in roles:
        penalized = experience.token_rewards.masked_fill(~rollout.response_mask, 0).sum(dim=1)
        parts["reward/after_kl_"] = (penalized, every)
    return parts


def _of_responses(experience: Experience, roles: Collection[str]) -> Parts:
    """What is told by its mean alone."""
    rollout, mask = experience.rollout, experience.rollout.response_mask
    every = torch.ones_like(rollout.truncated)
    parts = {"rollout/truncated_fraction": (rollout.truncated, every)}
    parts |= {f"reward/{name}": (values, ~values.isnan()) for name, values in rollout.rewards.items()}
    if "ref" in roles:
        kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, "k1").masked_fill(~mask, 0)
        parts["kl/ref"] = (kl.sum(dim=1), every)
    if "reward_model" in roles:
        parts["reward/from_model"] = (experience.reward - rollout.reward, every)
    return parts


def _of_groups(experience: Experience) -> Parts:
    """What the responses to one prompt say together; a group lies whole on one rank."""
    reward = experience.reward.double()
    _, place, sizes = experience.rollout.group.unique(return_inverse=True, return_counts=True)
    empty, several = reward.new_zeros(len(sizes)), sizes > 1
    low, high = (empty.scatter_reduce(0, place, reward, end, include_self=False) for end in ("amin", "amax"))
    mean = empty.index_add(0, place, reward) / sizes
    squares = empty.index_add(0, place, (reward - mean[place]) ** 2)
    return {
        "group/single_fraction": (~several, torch.ones_like(several)),
        "group/equal_reward_fraction": (low == high, several),
        "group/reward_std_mean": ((squares / (sizes - 1).clamp(min=1)).sqrt(), several),
    }
