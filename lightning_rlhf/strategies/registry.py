"""Register the role strategies with Lightning, on import, under the names used in configurations."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.strategies.ddp import RLHFDDPStrategy
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy

for _name, _class, _options in (
    ("rlhf_single", RLHFSingleDeviceStrategy, {}),
    ("rlhf_ddp", RLHFDDPStrategy, {}),
    ("rlhf_fsdp", RLHFFSDPStrategy, {}),
    ("rlhf_fsdp_offload", RLHFFSDPStrategy, {"cpu_offload": True}),
    ("rlhf_deepspeed_stage_1", RLHFDeepSpeedStrategy, {"stage": 1}),
    ("rlhf_deepspeed_stage_2", RLHFDeepSpeedStrategy, {"stage": 2}),
    ("rlhf_deepspeed_stage_2_offload", RLHFDeepSpeedStrategy, {"stage": 2, "offload_optimizer": True}),
    ("rlhf_deepspeed_stage_3", RLHFDeepSpeedStrategy, {"stage": 3}),
    (
        "rlhf_deepspeed_stage_3_offload",
        RLHFDeepSpeedStrategy,
        {"stage": 3, "offload_optimizer": True, "offload_params": True},
    ),
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _class, description=str(_class.__doc__).splitlines()[0], **_options)
