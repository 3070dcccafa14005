"""Comparison of the log-probabilities that engine and actor give to the same tokens."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.engine import RolloutEngine, engine_dtype
from lightning_rlhf.types import Rollout

# Largest difference that 99 of 100 tokens may have, nats. That of float32 on a GPU is a guess, not a measurement.
_BOUNDS = {("float32", "cpu"): 1e-3, ("float32", "cuda"): 1e-2}
_BFLOAT16_BOUND = 1.0
_MEAN_SHARE = 1 / 20


@torch.no_grad()
def compare(engine: RolloutEngine, module: RLHFModule, rollout: Rollout, max_logprob_diff: float | None) -> None:
    """Raise an error if the engine does not compute the same log-probabilities as the actor. All ranks.

    A single token may differ by any amount: among millions of tokens in bfloat16 some differ by more than a nat. A
    weight that is lost moves most tokens, and with them the mean and the 99th percentile.

    Args:
        engine: engine with the actor's weights.
        module: module with the actor.
        rollout: responses of the engine.
        max_logprob_diff: bound of the 99th percentile, nats; the mean's is a twentieth. None chooses by dtype and
            device.

    Raises:
        RuntimeError: a bound is exceeded on any rank; the message names the first parameter that differs.
    """
    rows = rollout.to(module.device)
    with module.trainer.precision_plugin.forward_context():
        logprobs = module.actor_scores("actor", rows).logprobs
    gaps = (logprobs - rows.rollout_logprobs).abs()[rows.response_mask]
    # One reduction, on every rank: a rank that fails alone would wait for the others below.
    mean, percentile, largest = module.data_ranks.max(gap_statistics(gaps)).tolist()
    dtype = engine_dtype(str(module.trainer.precision), module.sources["actor"].dtype)
    bound = max_logprob_diff or _BOUNDS.get((dtype, module.device.type), _BFLOAT16_BOUND)
    if mean <= bound * _MEAN_SHARE and percentile <= bound:
        return
    parameters = (
        module.role_strategy.iter_adapters if engine.swaps_adapters else module.role_strategy.iter_full_params
    )("actor")
    name = engine.first_difference(parameters)
    deque(parameters, maxlen=0)  # every rank goes through all of them
    cause = (
        f"the first parameter that differs is {name}"
        if name
        else "all weights were transferred correctly, so the engine damaged them or computes something else"
    )
    raise RuntimeError(
        f"engine and actor have the same weights, but their log-probabilities of the same tokens differ by {mean:.3g} "
        f"nats on average (allowed: {bound * _MEAN_SHARE:g}) and {percentile:.3g} at the 99th percentile (allowed: "
        f"{bound:g}, max_logprob_diff), {largest:.3g} at most: {cause}"
    )


def gap_statistics(gaps: Tensor) -> Tensor:
    """Return mean, 99th percentile and maximum of the differences; infinity where one of them is not a number.

    The percentile leaves out one token in a hundred; of fewer than a hundred it is the maximum.

    Args:
        gaps: (N,) absolute differences of the tokens, nats; may be empty.
    """
    gaps = torch.cat([gaps.double().nan_to_num(nan=torch.inf), gaps.new_zeros(1, dtype=torch.float64)])
    count = len(gaps) - 1  # without the 0 that stands in for an empty rollout
    ordered = gaps.sort(descending=True).values
    return torch.stack([gaps.sum() / max(count, 1), ordered[count // 100], ordered[0]])
