"""Log-probs and entropies before the first update, from the forward pass of that update."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.shares import shuffled
from lightning_rlhf.types import Experience, Rollout


@dataclass
class FirstForward:
    """Log-probs and entropies that the first update of a step computes, which are those before the update.

    The first mini-batch needs no separate pass for them: its ratio of new to old log-probs is exactly 1.

    Attributes:
        first: positions of the rows of the first mini-batch among the responses of all ranks.
        positions: positions of the rows of each micro-batch of the updates.
        logprobs: (rows, T) old log-probs of each of these micro-batches.
        entropies: (rows, T) old entropies of each of them.
    """

    first: Tensor
    positions: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @staticmethod
    def suits(module: Any) -> bool:
        """Check whether nothing needs the old log-probs of the first mini-batch before its update.

        Args:
            module: RLHFModule.
        """
        return not (
            module.update_epochs > 1
            or module.kl_reward.coef > 0
            or not module.correction.only_measures
            or module.advantages.needs_sum_pi_squared
            or module.policy_loss.selects_tokens
            or module.selects_rows
            or module.replaces("actor_loss", "minibatches", "old_scores", "token_rewards")
        )

    @classmethod
    def of_step(cls, module: Any, rollout: Rollout, seed: int) -> FirstForward | None:
        """Return one that has no log-probs yet; None where something needs them before the update. All ranks.

        Args:
            module: RLHFModule of the step.
            rollout: rows of this rank.
            seed: seed of the order of the rows.
        """
        if not cls.suits(module) or module.losses().get("actor") != module.actor_loss:
            return None
        rows = rollout.map(module.data_ranks.gather) if module.data_ranks.size > 1 else rollout
        rows = rows[rows.position.argsort(stable=True)]
        if len(rows.position.unique()) < len(rows):  # without own numbers, each rank counts from 0
            return None
        first = shuffled(rows, seed, module.keep_groups)[: module.minibatch_size].to(rows.position.device)
        return cls(rows.position[first]) if rows.included[first].any() else None

    def other_rows(self, module: Any, rollout: Rollout) -> Tensor | None:
        """Return the numbers of the rows that need a separate pass; None where no rank has any. All ranks.

        A rank without such rows evaluates its first row again, because a sharded forward pass needs all ranks.
        """
        others = torch.isin(rollout.position, self.first, invert=True)
        if not module.data_ranks.sum(others.sum()):
            return None
        if not others.any():
            others[0] = True
        return others.nonzero().squeeze(1)

    def record(self, rows: Experience, logprobs: Tensor, entropies: Tensor) -> Experience:
        """Store the old log-probs and entropies of a micro-batch, and return its rows with these log-probs.

        They are the given ones for rows of the first mini-batch, and those of the separate pass for others.

        Args:
            rows: micro-batch.
            logprobs: (rows, T) log-probs of the actor now.
            entropies: (rows, T) its entropies now.
        """
        position = rows.rollout.position
        is_first = torch.isin(position, self.first).unsqueeze(1)
        self.positions.append(position)
        self.logprobs.append(torch.where(is_first, logprobs.detach(), rows.old_logprobs))
        assert rows.entropies is not None  # suits() excludes a bypass
        self.entropies.append(torch.where(is_first, entropies.detach(), rows.entropies))
        return replace(rows, old_logprobs=self.logprobs[-1])

    def fill(self, experience: Experience, module: Any) -> Experience:
        """Return an experience with the recorded values; set the metrics of the gap to the engine. All ranks.

        Args:
            experience: rows of this rank, whose log-probs other ranks may have computed.
            module: RLHFModule that computed them.
        """
        if not self.logprobs or experience.entropies is None:  # no mini-batch had a token to learn from
            return experience
        ranks, rollout = module.data_ranks, experience.rollout
        positions, recorded = torch.cat(self.positions), [torch.cat(self.logprobs), torch.cat(self.entropies)]
        if ranks.size > 1:
            positions, recorded = ranks.gather(positions), [ranks.gather(values) for values in recorded]
        ordered, order = positions.sort()
        index = torch.searchsorted(ordered, rollout.position).clamp(max=len(ordered) - 1)
        is_recorded = (ordered[index] == rollout.position).unsqueeze(1)
        width = rollout.response_ids.shape[1]
        old, entropies = (
            torch.where(is_recorded, values[order[index], :width], before)
            for values, before in zip(recorded, (experience.old_logprobs, experience.entropies), strict=True)
        )
        mask = rollout.response_mask & rollout.included.unsqueeze(1)
        _, _, module.evaluation_metrics = module.correction(old, rollout.rollout_logprobs, mask, ranks)
        ref = experience.ref_logprobs if module.has_ref else old
        return replace(experience, old_logprobs=old, ref_logprobs=ref, entropies=entropies)
