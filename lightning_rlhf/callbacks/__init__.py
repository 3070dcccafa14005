"""Makes the top-level ``callbacks/`` folder importable; a wheel has that folder here instead."""

from pathlib import Path
from typing import TYPE_CHECKING

__path__ = [str(Path(__file__).resolve().parents[2] / "callbacks")]

from lightning_rlhf.callbacks.public import __all__ as __all__
from lightning_rlhf.callbacks.public import __dir__ as __dir__
from lightning_rlhf.callbacks.public import __getattr__ as __getattr__

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.public import *  # noqa: F403
