"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import SAPOLoss


class SAPOModule(RLHFModule):
    """GRPO with a soft gate in place of the clip.

    See "Soft Adaptive Policy Optimization", Gao et al. 2025.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        aggregation: from the losses of tokens to one loss.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: PolicyLoss = SAPOLoss(),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, aggregation=aggregation, **kwargs)
