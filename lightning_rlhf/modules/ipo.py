"""IPO: preferences without the assumption that they follow from rewards."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.objectives.preference_losses import DirectLoss, IPOLoss


class IPOModule(DPOModule):
    """Identity preference optimization: a pair's log-ratios are pulled a fixed distance apart, and not further.

    DPO pushes on where people always agree, however far the policy is from the reference by then.
    See "A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al. 2023.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        loss: from the log-ratios of a pair to its loss.
        **kwargs: see :class:`~lightning_rlhf.modules.dpo.DPOModule`.
    """

    def __init__(self, actor: str | ModelSource, loss: DirectLoss = IPOLoss(), **kwargs: Any) -> None:
        super().__init__(actor, loss=loss, **kwargs)
