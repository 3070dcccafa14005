"""GPG: the plain policy gradient over groups."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import GPG
from lightning_rlhf.objectives.policy_losses import ReinforceLoss


class GPGModule(RLHFModule):
    """The plain policy gradient over groups, scaled up for the groups that teach nothing.

    See "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", Chu et al. 2025.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GPG(),
        policy_loss: PolicyLoss = ReinforceLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)
