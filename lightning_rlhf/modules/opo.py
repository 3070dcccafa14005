"""OPO: on-policy REINFORCE with the baseline of least variance."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import OPO
from lightning_rlhf.objectives.policy_losses import ReinforceLoss


class OPOModule(RLHFModule):
    """On-policy REINFORCE with the baseline of least variance, the mean reward weighted by length.

    Keep it exactly on-policy: one update per rollout. See "On-Policy RL with Optimal Reward Baseline", Hao et al. 2025.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = OPO(),
        policy_loss: PolicyLoss = ReinforceLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)
