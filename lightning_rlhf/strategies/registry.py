"""Register the role strategies with Lightning, on import, under the names used in configurations."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.strategies.ddp import RLHFDDPStrategy
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.strategies.names import REGISTERED
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy

_CLASSES = (RLHFSingleDeviceStrategy, RLHFDDPStrategy, RLHFFSDPStrategy, RLHFDeepSpeedStrategy)
for _name, (_class_name, _options) in REGISTERED.items():
    _class = next(kind for kind in _CLASSES if kind.__name__ == _class_name)
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _class, description=str(_class.__doc__).splitlines()[0], **_options)
