"""GRPO: groups instead of a critic."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenMean
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.kl_controllers import KLTerm


class GRPOModule(RLHFModule):
    """Group relative policy optimization: the other responses to a prompt are the baseline, there is no critic.

    Rewards are standardised within each group, the clipped surrogate is averaged over each response, and the KL to the
    reference is part of the loss. See "DeepSeekMath", Shao et al. 2024, section 4.1.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        kl_loss: KL to the reference added to the loss.
        aggregation: from the losses of tokens to one loss.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        kl_loss: KLTerm = KLTerm(0.04, "k3"),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, kl_loss=kl_loss, aggregation=aggregation, **kwargs)
