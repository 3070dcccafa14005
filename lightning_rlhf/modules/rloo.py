"""RLOO: REINFORCE with the other responses' mean reward as baseline."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenSum
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.group_advantages import RLOO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ReinforceLoss


class RLOOModule(RLHFModule):
    """REINFORCE whose baseline is the mean reward of the other responses to the prompt.

    See "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
    Ahmadian et al. 2024, section 3.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        advantages: from rewards to advantages.
        policy_loss: from log-probabilities and advantages to a loss per token.
        kl_reward: KL to the reference subtracted from each token's reward.
        aggregation: from the losses of tokens to one loss.
        **kwargs: see :class:`~lightning_rlhf.modules.base.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = RLOO(),
        policy_loss: PolicyLoss = ReinforceLoss(),
        kl_reward: KLTerm = KLTerm(0.05),
        aggregation: Aggregation = SequenceMeanTokenSum(),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            advantages=advantages,
            policy_loss=policy_loss,
            kl_reward=kl_reward,
            aggregation=aggregation,
            **kwargs,
        )
