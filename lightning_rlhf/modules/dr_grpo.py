"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenSum
from lightning_rlhf.objectives.base import AdvantageEstimator
from lightning_rlhf.objectives.group_advantages import GRPO


class DrGRPOModule(RLHFModule):
    """GRPO without its two biases: no division by the group's deviation, none by the response's length.

    Set the scale of ``aggregation`` to the longest response.
    See "Understanding R1-Zero-Like Training: A Critical Perspective", Liu et al. 2025, section 3.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        aggregation: from the losses of tokens to one loss.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(normalize_std=False),
        aggregation: Aggregation = SequenceMeanTokenSum(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, aggregation=aggregation, **kwargs)
