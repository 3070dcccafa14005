"""Weights of the engine: pushes of the actor's weights, and the check that both compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.gpu_memory import limit_gpu_memory
from lightning_rlhf.rollout.ranks import world_size
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import Rollout


@dataclass
class EngineWeights:
    """Keeps the engine's weights equal to the actor's.

    Args:
        roles: strategy of the run, which has the actor.
        device: device of the actor.
        dtype: dtype in which matrices are pushed.
        compare: function that raises an error if engine and actor compute different log-probs of some responses.
        pushed: number of finished steps of the weights that the engine has; None if it has none.
    """

    engine: RolloutEngine
    roles: RoleStrategy
    device: torch.device
    dtype: torch.dtype
    compare: Callable[[Rollout], None]
    clock: Clock
    pushed: int | None = None

    @property
    def version(self) -> int:
        """Number of finished steps of the weights that the engine has."""
        assert self.pushed is not None
        return self.pushed

    def sync(self, step: int) -> None:
        """Copy the actor's weights to the engine, unless it has them. All ranks.

        Args:
            step: number of finished steps, the version of the weights.
        """
        with self.clock("time/sync_s"):
            if self.pushed == step:
                return
            engine = self.engine
            limit_gpu_memory(self.device, engine.traits.gpu_fraction)
            receivers = range(0, world_size(), engine.traits.push_ranks)
            if not engine.traits.swaps_adapters:
                engine.update_weights(self.roles.iter_full_params("actor", self.dtype, receivers), step)
            else:
                if self.pushed is None:
                    engine.update_weights(self.roles.iter_base_params("actor", receivers), step)
                engine.update_adapters(self.roles.iter_adapters("actor"), step)
            self.pushed = step

    def check(self, rollout: Rollout) -> None:
        """Compare engine and actor on responses of the weights that both have, to find damaged weights. All ranks.

        Raises:
            RuntimeError: log-probs differ, or are not finite.
        """
        with self.clock("time/check_s"):
            self.compare(rollout)

    def let_engine_sleep(self) -> None:
        """Let the engine sleep if it can, and let the trainer use all GPU memory until the next sync."""
        if self.engine.traits.sleeps:
            self.engine.sleep()
            self.pushed = None  # sleep discards the weights
            limit_gpu_memory(self.device, 0.0)


def check_finite(rollout: Rollout) -> None:
    """Validate the log-probs of the engine.

    Raises:
        RuntimeError: one of them is not finite.
    """
    if not rollout.rollout_logprobs.isfinite().all():
        raise RunError("the engine returned log-probabilities that are not finite: its weights are damaged")
