"""DAPO: GRPO with a wider upper clip, a mean over tokens and no KL."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss


class DAPOModule(RLHFModule):
    """GRPO with a wider upper clip, every token counting the same, and no KL.

    The other half of the method stands around the module: ``dynamic_sampling`` of RolloutLoop, and the reward
    :class:`~lightning_rlhf.rewards.shaping.OverlongPenalty`.
    See "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al. 2025, section 3.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: PolicyLoss = ClippedPolicyLoss(clip_range_low=0.2, clip_range_high=0.28),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)
