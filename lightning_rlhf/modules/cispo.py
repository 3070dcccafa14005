"""CISPO: clipped importance weights as constants."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import CISPOLoss


class CISPOModule(RLHFModule):
    """GRPO whose importance weight is clipped and taken for a constant, so that every token keeps its gradient.

    See "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, section 3.1.

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
        policy_loss: PolicyLoss = CISPOLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)
