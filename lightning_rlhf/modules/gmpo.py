"""GMPO: the geometric mean of the token ratios."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.sequence_policy_losses import GMPOLoss


class GMPOModule(RLHFModule):
    """GRPO with the geometric mean of the token ratios, which outliers move less.

    See "Geometric-Mean Policy Optimization", Zhao et al. 2025.

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
        policy_loss: PolicyLoss = GMPOLoss(),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, aggregation=aggregation, **kwargs)
