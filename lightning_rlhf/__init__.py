"""RLHF for PyTorch Lightning: a module contains actor, critic, reference and reward model; callbacks run rollouts.

Public names are imported on first use (PEP 562), so that importing the package is fast.
"""

from typing import TYPE_CHECKING

from lightning_rlhf import moved as moved
from lightning_rlhf.__about__ import __version__
from lightning_rlhf.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_rlhf.data.conversations import ConversationDataModule as ConversationDataModule
    from lightning_rlhf.data.preferences import PreferenceDataModule as PreferenceDataModule
    from lightning_rlhf.data.prompts import PromptDataModule as PromptDataModule
    from lightning_rlhf.extras.algorithms.distillation import DistillationModule as DistillationModule
    from lightning_rlhf.extras.algorithms.dpo import DPOModule as DPOModule
    from lightning_rlhf.extras.algorithms.dpo import IPOModule as IPOModule
    from lightning_rlhf.extras.algorithms.echo import ECHOModule as ECHOModule
    from lightning_rlhf.extras.algorithms.kto import KTOModule as KTOModule
    from lightning_rlhf.extras.algorithms.mixture import MixtureModule as MixtureModule
    from lightning_rlhf.extras.algorithms.presets import GMPOModule as GMPOModule
    from lightning_rlhf.extras.algorithms.presets import GPGModule as GPGModule
    from lightning_rlhf.extras.algorithms.presets import GSPOModule as GSPOModule
    from lightning_rlhf.extras.algorithms.presets import OPOModule as OPOModule
    from lightning_rlhf.extras.algorithms.presets import SAPOModule as SAPOModule
    from lightning_rlhf.extras.algorithms.ranked_rows import RankingDataModule as RankingDataModule
    from lightning_rlhf.extras.algorithms.rankings import RankingRewardModule as RankingRewardModule
    from lightning_rlhf.extras.algorithms.response_pairs import OnlineDPOModule as OnlineDPOModule
    from lightning_rlhf.extras.algorithms.response_pairs import REBELModule as REBELModule
    from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedDataModule as UnpairedDataModule
    from lightning_rlhf.models.loading import FromConfig as FromConfig
    from lightning_rlhf.models.loading import Pretrained as Pretrained
    from lightning_rlhf.modules.algorithms import CISPOModule as CISPOModule
    from lightning_rlhf.modules.algorithms import DAPOModule as DAPOModule
    from lightning_rlhf.modules.algorithms import DrGRPOModule as DrGRPOModule
    from lightning_rlhf.modules.algorithms import GRPOModule as GRPOModule
    from lightning_rlhf.modules.algorithms import ReinforcePlusPlusModule as ReinforcePlusPlusModule
    from lightning_rlhf.modules.algorithms import ReMaxModule as ReMaxModule
    from lightning_rlhf.modules.algorithms import RLOOModule as RLOOModule
    from lightning_rlhf.modules.ppo import PPOModule as PPOModule
    from lightning_rlhf.modules.reward import RewardModule as RewardModule
    from lightning_rlhf.modules.rlhf import RLHFModule as RLHFModule
    from lightning_rlhf.modules.sft import SFTModule as SFTModule
    from lightning_rlhf.types import Experience as Experience
    from lightning_rlhf.types import Rollout as Rollout
    from lightning_rlhf.types import SamplingParams as SamplingParams

_HOME = {
    "ConversationDataModule": "lightning_rlhf.data.conversations",
    "PreferenceDataModule": "lightning_rlhf.data.preferences",
    "PromptDataModule": "lightning_rlhf.data.prompts",
    "UnpairedDataModule": "lightning_rlhf.extras.algorithms.unpaired_rows",
    "FromConfig": "lightning_rlhf.models.loading",
    "Pretrained": "lightning_rlhf.models.loading",
    "CISPOModule": "lightning_rlhf.modules.algorithms",
    "DAPOModule": "lightning_rlhf.modules.algorithms",
    "DistillationModule": "lightning_rlhf.extras.algorithms.distillation",
    "DPOModule": "lightning_rlhf.extras.algorithms.dpo",
    "DrGRPOModule": "lightning_rlhf.modules.algorithms",
    "GMPOModule": "lightning_rlhf.extras.algorithms.presets",
    "GPGModule": "lightning_rlhf.extras.algorithms.presets",
    "GRPOModule": "lightning_rlhf.modules.algorithms",
    "GSPOModule": "lightning_rlhf.extras.algorithms.presets",
    "IPOModule": "lightning_rlhf.extras.algorithms.dpo",
    "ECHOModule": "lightning_rlhf.extras.algorithms.echo",
    "KTOModule": "lightning_rlhf.extras.algorithms.kto",
    "MixtureModule": "lightning_rlhf.extras.algorithms.mixture",
    "OnlineDPOModule": "lightning_rlhf.extras.algorithms.response_pairs",
    "OPOModule": "lightning_rlhf.extras.algorithms.presets",
    "PPOModule": "lightning_rlhf.modules.ppo",
    "RankingDataModule": "lightning_rlhf.extras.algorithms.ranked_rows",
    "RankingRewardModule": "lightning_rlhf.extras.algorithms.rankings",
    "REBELModule": "lightning_rlhf.extras.algorithms.response_pairs",
    "RLHFModule": "lightning_rlhf.modules.rlhf",
    "RLOOModule": "lightning_rlhf.modules.algorithms",
    "ReMaxModule": "lightning_rlhf.modules.algorithms",
    "ReinforcePlusPlusModule": "lightning_rlhf.modules.algorithms",
    "RewardModule": "lightning_rlhf.modules.reward",
    "SAPOModule": "lightning_rlhf.extras.algorithms.presets",
    "SFTModule": "lightning_rlhf.modules.sft",
    "Experience": "lightning_rlhf.types",
    "Rollout": "lightning_rlhf.types",
    "SamplingParams": "lightning_rlhf.types",
}
__all__ = ["__version__", *_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
