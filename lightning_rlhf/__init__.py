"""RLHF for PyTorch Lightning: one module holds actor, critic, reference and reward model; callbacks do the rest.

The public names are loaded on first use (PEP 562), so importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_rlhf.__about__ import __version__

if TYPE_CHECKING:
    from lightning_rlhf.data.conversations import ConversationDataModule as ConversationDataModule
    from lightning_rlhf.data.preferences import PreferenceDataModule as PreferenceDataModule
    from lightning_rlhf.data.prompts import PromptDataModule as PromptDataModule
    from lightning_rlhf.models.loading import FromConfig as FromConfig
    from lightning_rlhf.models.loading import Pretrained as Pretrained
    from lightning_rlhf.modules.base import RLHFModule as RLHFModule
    from lightning_rlhf.modules.ppo import PPOModule as PPOModule
    from lightning_rlhf.modules.reward import RewardModule as RewardModule
    from lightning_rlhf.modules.sft import SFTModule as SFTModule
    from lightning_rlhf.types import Experience as Experience
    from lightning_rlhf.types import Rollout as Rollout
    from lightning_rlhf.types import SamplingParams as SamplingParams

_HOME = {
    "ConversationDataModule": "lightning_rlhf.data.conversations",
    "PreferenceDataModule": "lightning_rlhf.data.preferences",
    "PromptDataModule": "lightning_rlhf.data.prompts",
    "FromConfig": "lightning_rlhf.models.loading",
    "Pretrained": "lightning_rlhf.models.loading",
    "RLHFModule": "lightning_rlhf.modules.base",
    "PPOModule": "lightning_rlhf.modules.ppo",
    "RewardModule": "lightning_rlhf.modules.reward",
    "SFTModule": "lightning_rlhf.modules.sft",
    "Experience": "lightning_rlhf.types",
    "Rollout": "lightning_rlhf.types",
    "SamplingParams": "lightning_rlhf.types",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_rlhf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
