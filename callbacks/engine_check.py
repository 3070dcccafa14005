"""Whether engine and actor say the same of the same tokens."""

from __future__ import annotations

from collections import deque

import torch

from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.types import Rollout


@torch.no_grad()
def compare(engine: RolloutEngine, module: RLHFModule, rollout: Rollout, max_logprob_diff: float | None) -> None:
    """Refuse an engine that computes something else than the actor. All ranks.

    Args:
        engine: that has the actor's weights.
        module: with the actor.
        rollout: responses of the engine.
        max_logprob_diff: largest difference that passes, nats; None is 1e-3 for float32 and 1 for bfloat16.

    Raises:
        RuntimeError: they differ by more; the message names the first parameter that differs.
    """
    rows = rollout.to(module.device)
    with module.trainer.precision_plugin.forward_context():
        logprobs = module.actor_scores("actor", rows).logprobs
    gap = (logprobs - rows.rollout_logprobs).abs()[rows.response_mask].nan_to_num(nan=torch.inf).max()
    worst = module.roles.max_over_ranks(gap).item()  # or a rank alone would wait for the others below
    single = module.sources["actor"].dtype == "float32" and module.trainer.precision == "32-true"
    bound = max_logprob_diff if max_logprob_diff is not None else 1e-3 if single else 1.0
    if worst <= bound:
        return
    parameters = (module.roles.iter_adapters if engine.swaps_adapters else module.roles.iter_full_params)("actor")
    name = engine.first_difference(parameters)
    deque(parameters, maxlen=0)  # every rank goes through all of them
    cause = (
        f"the first parameter that differs is {name}"
        if name
        else "all that was pushed is what the actor has, so the engine garbled it or computes something else"
    )
    raise RuntimeError(
        f"engine and actor disagree by {worst:.3g} nats on a token they were given the same weights for "
        f"(allowed: {bound:g}, max_logprob_diff): {cause}"
    )
