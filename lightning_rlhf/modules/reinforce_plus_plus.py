"""REINFORCE++: PPO's clipped loss on rewards-to-go that are whitened over the whole batch."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus


class ReinforcePlusPlusModule(RLHFModule):
    """PPO's clipped loss on rewards-to-go that are whitened over the whole batch; no critic, no groups.

    See "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", Hu 2025, section 3.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        kl_reward: KL to the reference subtracted from each token's reward.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = ReinforcePlusPlus(),
        kl_reward: KLTerm = KLTerm(0.01),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, kl_reward=kl_reward, **kwargs)
