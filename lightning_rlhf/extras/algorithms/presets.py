"""Rarer algorithms that differ from RLHFModule in their defaults only."""

from __future__ import annotations

from lightning_rlhf.extras.algorithms.group_advantages import GPG, OPO
from lightning_rlhf.extras.algorithms.policy_losses import SAPOLoss
from lightning_rlhf.extras.algorithms.sequence_policy_losses import GMPOLoss, GSPOLoss
from lightning_rlhf.modules.algorithms import with_defaults
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.policy_losses import ReinforceLoss


@with_defaults(advantages=GRPO(), policy_loss=GSPOLoss(), aggregation=SequenceMeanTokenMean())
class GSPOModule(RLHFModule):
    """GRPO with one importance ratio per response, clipped as a whole.

    See "Group Sequence Policy Optimization", Zheng et al. 2025, section 4.
    """


@with_defaults(advantages=GRPO(), policy_loss=GMPOLoss(), aggregation=SequenceMeanTokenMean())
class GMPOModule(RLHFModule):
    """GRPO with the geometric mean of the token ratios, because it is less sensitive to outliers.

    See "Geometric-Mean Policy Optimization", Zhao et al. 2025.
    """


@with_defaults(advantages=GRPO(), policy_loss=SAPOLoss(), aggregation=SequenceMeanTokenMean())
class SAPOModule(RLHFModule):
    """GRPO with a soft gate instead of the clip.

    See "Soft Adaptive Policy Optimization", Gao et al. 2025.
    """


@with_defaults(advantages=GPG(), policy_loss=ReinforceLoss())
class GPGModule(RLHFModule):
    """Plain policy gradient over groups, scaled up to make up for groups without a difference in reward.

    See "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", Chu et al. 2025.
    """


@with_defaults(advantages=OPO(), policy_loss=ReinforceLoss())
class OPOModule(RLHFModule):
    """On-policy REINFORCE with the baseline of least variance, the mean reward weighted by length.

    Keep it exactly on-policy: one update per rollout. See "On-Policy RL with Optimal Reward Baseline", Hao et al. 2025.
    """
