"""ReMax: REINFORCE with the greedy response's reward as baseline."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.base import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenSum
from lightning_rlhf.objectives.base import AdvantageEstimator, PolicyLoss
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.objectives.return_advantages import ReMax


class ReMaxModule(RLHFModule):
    """REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    RolloutLoop generates and judges the greedy responses. See "ReMax: A Simple, Effective, and Efficient Reinforcement
    Learning Method for Aligning Large Language Models", Li et al. 2024, section 4.

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
        advantages: AdvantageEstimator = ReMax(),
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
