"""What a step's metrics say of the experience it learnt from."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_rlhf.functional.diagnostics import explained_variance
from lightning_rlhf.functional.kl import kl_estimate
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.types import Experience

# Metrics that say nothing where a role is absent.
MADE_BY = {
    "ref": ("kl/ref",),
    "reward_model": ("reward/from_model",),
    "critic": ("value/mean", "value/explained_variance"),
}


def describe(
    experience: Experience, reduce: Callable[[Tensor], Tensor], reduce_max: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Metrics of one rollout, over all ranks.

    ``kl/ref`` is nats per response, estimated by k1. ``rollout/logprob_diff_mean`` is the mean over tokens of the
    absolute difference between the engine's and the actor's log-probabilities.

    ``reward/mean`` is what the responses were worth, before any KL penalty; ``reward/from_model`` the reward model's
    part of it.

    Args:
        experience: of this step.
        reduce: sums a tensor over ranks.
        reduce_max: takes the elementwise maximum over ranks.
    """
    rollout, mask = experience.rollout, experience.rollout.response_mask
    sums = Sums()
    kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, "k1").masked_fill(~mask, 0).sum(dim=1)
    sums.add("reward/mean", experience.reward)
    sums.add("reward/from_model", experience.reward - rollout.reward)
    sums.add("kl/ref", kl)
    for name, values in rollout.rewards.items():
        sums.add(f"reward/{name}", values, ~values.isnan())
    sums.add("rollout/response_tokens_mean", rollout.response_lengths.float())
    sums.add("rollout/truncated_fraction", rollout.truncated.float())
    gap = (experience.old_logprobs - rollout.rollout_logprobs).abs()
    sums.add("rollout/logprob_diff_mean", gap, mask)
    sums.add("value/mean", experience.values, mask)
    metrics = sums.means(reduce)
    spread = Sums()
    spread.add("variance", (experience.reward - metrics["reward/mean"]) ** 2)
    metrics["reward/std"] = spread.means(reduce)["variance"] ** 0.5
    metrics["value/explained_variance"] = explained_variance(experience.values, experience.returns, mask, reduce).item()
    metrics["rollout/response_tokens"] = reduce(rollout.response_lengths.sum()).item()
    metrics["rollout/logprob_diff_max"] = reduce_max(torch.where(mask, gap, torch.zeros_like(gap)).max()).item()
    return metrics
