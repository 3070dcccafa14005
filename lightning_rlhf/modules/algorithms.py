"""Algorithms that differ from :class:`RLHFModule` or :class:`DPOModule` in their defaults only."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, SequenceMeanTokenMean, SequenceMeanTokenSum
from lightning_rlhf.objectives.base import AdvantageEstimator, AnyPolicyLoss
from lightning_rlhf.objectives.group_advantages import GPG, GRPO, OPO, RLOO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import CISPOLoss, ClippedPolicyLoss, ReinforceLoss, SAPOLoss
from lightning_rlhf.objectives.preference_losses import DirectLoss, IPOLoss
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus, ReMax
from lightning_rlhf.objectives.sequence_policy_losses import GMPOLoss, GSPOLoss


class GRPOModule(RLHFModule):
    """GRPO: the other responses to a prompt are the baseline, there is no critic.

    Rewards are standardised within each group, the clipped surrogate is averaged over each response, and the KL to the
    reference is part of the loss. See "DeepSeekMath", Shao et al. 2024, section 4.1.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        kl_loss: KL to the reference added to the loss.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
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


class DrGRPOModule(RLHFModule):
    """GRPO without its two biases: no division by the group's deviation, none by the response's length.

    Set the scale of ``aggregation`` to the longest response.
    See "Understanding R1-Zero-Like Training: A Critical Perspective", Liu et al. 2025, section 3.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(normalize_std=False),
        aggregation: Aggregation = SequenceMeanTokenSum(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, aggregation=aggregation, **kwargs)


class DAPOModule(RLHFModule):
    """GRPO with a wider upper clip, a mean over tokens, and no KL.

    The rest of the method is outside of the module: ``dynamic_sampling`` of RolloutLoop, and the reward
    :class:`~lightning_rlhf.rewards.shaping.OverlongPenalty`.
    See "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al. 2025, section 3.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: AnyPolicyLoss = ClippedPolicyLoss(clip_range_low=0.2, clip_range_high=0.28),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)


class GSPOModule(RLHFModule):
    """GRPO with one importance ratio per response, clipped as a whole.

    See "Group Sequence Policy Optimization", Zheng et al. 2025, section 4.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: AnyPolicyLoss = GSPOLoss(),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, aggregation=aggregation, **kwargs)


class GMPOModule(RLHFModule):
    """GRPO with the geometric mean of the token ratios, which is less sensitive to outliers.

    See "Geometric-Mean Policy Optimization", Zhao et al. 2025.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: AnyPolicyLoss = GMPOLoss(),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, aggregation=aggregation, **kwargs)


class CISPOModule(RLHFModule):
    """GRPO whose importance weight is clipped and treated as a constant, so that every token keeps its gradient.

    See "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, section 3.1.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: AnyPolicyLoss = CISPOLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)


class SAPOModule(RLHFModule):
    """GRPO with a soft gate instead of the clip.

    See "Soft Adaptive Policy Optimization", Gao et al. 2025.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GRPO(),
        policy_loss: AnyPolicyLoss = SAPOLoss(),
        aggregation: Aggregation = SequenceMeanTokenMean(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, aggregation=aggregation, **kwargs)


class GPGModule(RLHFModule):
    """Plain policy gradient over groups, scaled up for the groups without a difference in reward.

    See "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", Chu et al. 2025.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = GPG(),
        policy_loss: AnyPolicyLoss = ReinforceLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)


class OPOModule(RLHFModule):
    """On-policy REINFORCE with the baseline of least variance, the mean reward weighted by length.

    Keep it exactly on-policy: one update per rollout. See "On-Policy RL with Optimal Reward Baseline", Hao et al. 2025.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = OPO(),
        policy_loss: AnyPolicyLoss = ReinforceLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, policy_loss=policy_loss, **kwargs)


class RLOOModule(RLHFModule):
    """REINFORCE whose baseline is the mean reward of the other responses to the prompt.

    See "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
    Ahmadian et al. 2024, section 3.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        kl_reward: KL to the reference subtracted from each token's reward.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = RLOO(),
        policy_loss: AnyPolicyLoss = ReinforceLoss(),
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


class ReMaxModule(RLHFModule):
    """REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    RolloutLoop generates and scores the greedy responses. See "ReMax: A Simple, Effective, and Efficient Reinforcement
    Learning Method for Aligning Large Language Models", Li et al. 2024, section 4.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        policy_loss: loss per token from log-probabilities and advantages.
        kl_reward: KL to the reference subtracted from each token's reward.
        aggregation: reduction of the losses of tokens to one loss.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = ReMax(),
        policy_loss: AnyPolicyLoss = ReinforceLoss(),
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


class ReinforcePlusPlusModule(RLHFModule):
    """PPO's clipped loss on rewards-to-go that are whitened over the whole batch; no critic, no groups.

    See "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", Hu 2025, section 3.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        advantages: estimator of advantages from rewards.
        kl_reward: KL to the reference subtracted from each token's reward.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        advantages: AdvantageEstimator = ReinforcePlusPlus(),
        kl_reward: KLTerm = KLTerm(0.01),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantages=advantages, kl_reward=kl_reward, **kwargs)


class IPOModule(DPOModule):
    """Identity preference optimization: a pair's log-ratios are moved a fixed distance apart, and no further.

    DPO increases the distance without bound where all annotators agree.
    See "A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al. 2023.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        loss: loss of a pair from its log-ratios.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.dpo.DPOModule`.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        loss: DirectLoss = IPOLoss(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, **kwargs)
