"""Log-probs before the first update, from the forward pass of that update."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.types import Experience


@dataclass
class FirstForward:
    """Log-probs that the only update of a step computes, which are those before the update.

    A step with one update needs no separate pass for them: the ratio of new to old log-probs is exactly 1.

    Attributes:
        positions: positions of the rows of each micro-batch among the responses of all ranks.
        logprobs: (rows, T) log-probs of each micro-batch.
    """

    positions: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    def record(self, rows: Experience, logprobs: Tensor) -> Tensor:
        """Store the log-probs of a micro-batch; return them as old log-probs, (rows, T) without gradient."""
        self.positions.append(rows.rollout.position)
        self.logprobs.append(logprobs.detach())
        return self.logprobs[-1]

    def fill(self, experience: Experience, module: Any) -> tuple[Experience, dict[str, float]]:
        """Return an experience with the recorded log-probs, and the metrics of their gap to the engine's. All ranks.

        Args:
            experience: rows of this rank, whose log-probs other ranks may have computed.
            module: RLHFModule that computed them.
        """
        ranks, rollout = module.data_ranks, experience.rollout
        positions = ranks.gather(torch.cat(self.positions))
        gathered = ranks.gather(torch.cat(self.logprobs))
        by_position = gathered.new_zeros(int(positions.max()) + 1, gathered.shape[1])
        by_position[positions] = gathered
        old = by_position[rollout.position, : rollout.response_ids.shape[1]]
        mask = rollout.response_mask & rollout.included.unsqueeze(1)
        _, _, metrics = module.correction(old, rollout.rollout_logprobs, mask, ranks)
        ref = experience.ref_logprobs if module.has_ref else old
        return replace(experience, old_logprobs=old, ref_logprobs=ref), metrics
