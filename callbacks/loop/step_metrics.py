"""Metrics of the rollout of a step."""

from __future__ import annotations

from math import inf

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.ahead import RestoredResponses, covered
from lightning_rlhf.rollout.clock import Clock, max_over_ranks, sum_over_ranks
from lightning_rlhf.rollout.source import SampledRollout, reward_metrics


def rollout_metrics(
    sampled: SampledRollout, module: RLHFModule, clock: Clock, max_staleness: int, restarted: int | None = None
) -> dict[str, float]:
    """Return times, speed, staleness and reward metrics of the step over all ranks. All ranks.

    Args:
        sampled: rollout of the step.
        max_staleness: largest allowed difference of the step and the version of a token.
        restarted: number of times that this rank's engine was started again; None for an engine that is not.

    Raises:
        RuntimeError: a token is from older weights than allowed.
    """
    ranks, device = module.data_ranks, module.device
    tokens = sum(len(each.token_ids) for request in sampled.requests for each in request.completions())
    largest = {**clock.seconds, "generation": clock.seconds["time/generate_s"]}
    if sampled.rewards is not None:
        largest.pop("time/reward_s", None)  # the module logs it, and the metrics of the rewards
    if not all(request.is_current for request in sampled.requests):
        largest["generation"] = covered([request.interval for request in sampled.requests], -inf, inf)
    summed = {"tokens": float(tokens)} | ({} if restarted is None else {"restarts": float(restarted)})
    if max_staleness:
        rollout = sampled.rollout
        versions = rollout.policy_version[rollout.response_mask & rollout.sampled_rows.unsqueeze(1)]
        staleness = module.trainer.global_step - versions.double()
        largest["rollout/staleness_max"] = float(staleness.max()) if len(staleness) else 0.0
        summed |= {"staleness": float(staleness.sum()), "trained": float(len(staleness))}
    metrics = max_over_ranks(largest, ranks, device)  # all ranks wait for the slowest
    total = sum_over_ranks(summed, ranks, device)
    seconds = metrics.pop("generation")
    restored = any(isinstance(request.pending, RestoredResponses) for request in sampled.requests)
    if not restored and seconds > 0:  # 0 if all responses are given
        metrics["rollout/tokens_per_s"] = total["tokens"] / seconds
    if restarted is not None:
        metrics["perf/engine_restarts"] = total["restarts"]
    if max_staleness:
        metrics["rollout/staleness_mean"] = total["staleness"] / max(total["trained"], 1.0)
        if metrics["rollout/staleness_max"] > max_staleness:
            raise RunError(
                f"a token is from weights that are {metrics['rollout/staleness_max']:g} steps old, more than "
                f"max_staleness {max_staleness} allows"
            )
    if sampled.rewards is None:
        metrics |= reward_metrics(sampled.reward_sums, module.role_strategy)
    return metrics | sampled.metrics
