"""Callbacks: rollouts, checkpoints, metrics and logs. Installed as ``lightning_rlhf.callbacks``.

Names are imported on first use (PEP 562), so that a command that reads the files of a run does not import torch.
"""

from typing import TYPE_CHECKING

if __name__ != "lightning_rlhf.callbacks":
    raise ImportError("import lightning_rlhf.callbacks, not the folder name 'callbacks'")

from lightning_rlhf.callbacks.public import __all__ as __all__
from lightning_rlhf.callbacks.public import __dir__ as __dir__
from lightning_rlhf.callbacks.public import __getattr__ as __getattr__

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.public import *  # noqa: F403
