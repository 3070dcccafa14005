"""The role strategies under the names that a configuration uses; importing this registers them with Lightning."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.strategies.ddp import RLHFDDPStrategy
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy

for _name, _class, _options in (
    ("rlhf_single", RLHFSingleDeviceStrategy, {}),
    ("rlhf_ddp", RLHFDDPStrategy, {}),
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _class, description=str(_class.__doc__).splitlines()[0], **_options)
