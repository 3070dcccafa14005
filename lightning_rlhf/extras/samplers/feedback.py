"""RewardFeedback: passes the rewards of each step to the sampler that chooses the next rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.callbacks.loop.checks import check_module, last_step_of
from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.samplers.history import RowHistory
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.types import PromptBatch, Rollout


class ObservedOrder(Protocol):
    """Order of rows that depends on rewards."""

    history: RowHistory
    filled: dict[int, int]
    batch_size: int

    def observe(self, groups: Mapping[int, Sequence[float]], step: int) -> None:
        """Take the rewards of a step, by the numbers of its rows."""

    def weights(self) -> Tensor:
        """Return the (N,) weights of the rows."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state."""


class RewardFeedback(Callback):
    """Passes the rewards of each step to the order of the rows, and keeps its state in checkpoints.

    ``Adaptive`` adds it to the Trainer. Rewards of all ranks are gathered, so that all ranks choose the same rows.

    Args:
        reward: name of the reward; None takes the total reward.
    """

    def __init__(self, reward: str | None) -> None:
        self._reward = reward
        self._order: ObservedOrder | None = None
        self._restored: dict[str, Any] | None = None
        self._samples = 1
        self._loop: RolloutLoop | None = None

    def use(self, order: ObservedOrder) -> None:
        """Set the order, with the state of the one before, or of the checkpoint that the run resumes from."""
        state = self._restored if self._order is None else self._order.state_dict()
        self._order = order
        if state is not None:
            order.load_state_dict(state)

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate that the run has rewards.

        Raises:
            UsageError: the module has no rollouts, or no reward has this name.
        """
        check_module(self, pl_module, RLHFModule)
        loops = [callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)]
        if not loops:
            raise UsageError(
                "Adaptive reads rows by their rewards, which needs a RolloutLoop: add it, or another sampler"
            )
        self._loop = loops[0]
        self._samples = self._loop.group_size
        names = list(self._loop.reward_weights)
        if self._reward is not None and self._reward not in names:
            raise UsageError(f"Adaptive has reward {self._reward!r}, which is not among {names}: use one of them")
        if not names and "reward_model" not in pl_module.sources:
            raise UsageError("Adaptive reads rows by their rewards, but this run has none: use another sampler")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Pass the rewards of the step to the order, and log what it has observed."""
        order = self._order
        if order is None:
            raise UsageError("Adaptive needs the data loader of PromptDataModule: do not override train_dataloader")
        experience = last_step_of(self, pl_module).experience
        parts = [self._table(experience.rollout, experience.reward, batch)]
        sampled = None if self._loop is None else self._loop.sampled
        if sampled is not None and (unused := sampled.unused) is not None:
            parts.append(self._table(unused, unused.reward, batch).to(parts[0].device))
        table = pl_module.data_ranks.gather(torch.cat(parts)).cpu()
        step = trainer.global_step - 1
        groups = defaultdict[int, list[float]](list)
        for number, reward in table.tolist():
            groups[int(number)] += [] if math.isnan(reward) else [reward]
        filled = order.filled.get(min(order.filled, default=0), 0)
        order.observe(groups, step)
        pl_module.log_step("sampler", self._metrics(order, filled))

    def _table(self, rollout: Rollout, total: Tensor, batch: PromptBatch) -> Tensor:
        """Return the (B, 2) float64 number of each response's row, and its reward, NaN without one."""
        rewards = total if self._reward is None else rollout.rewards[self._reward]
        rewards = rewards.double().masked_fill(~rollout.sampled_rows, torch.nan)
        numbers = {prompt.position: prompt.index for prompt in batch}
        positions = (rollout.position // self._samples).tolist()
        rows = torch.tensor([numbers[position] for position in positions], dtype=torch.float64, device=rewards.device)
        return torch.stack([rows, rewards], dim=1)

    def _metrics(self, order: ObservedOrder, filled: int) -> dict[str, float]:
        history = order.history
        observed = history.observed
        return {
            "sampler/observed_fraction": float(observed.double().mean()),
            "sampler/solve_rate": float(history.solve_rate[observed].mean()) if observed.any() else torch.nan,
            "sampler/left_out_fraction": float((order.weights() == 0).double().mean()),
            "sampler/filled_fraction": filled / order.batch_size,
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._order is None else self._order.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None
        if self._order is not None and self._restored is not None:
            self._order.load_state_dict(self._restored)
