"""Names of the role strategies, and the mapping from Lightning's strategy names to them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

# Role strategies that correspond to Lightning's strategy classes.
OURS = {
    "SingleDeviceStrategy": "rlhf_single",
    "DDPStrategy": "rlhf_ddp",
    "FSDPStrategy": "rlhf_fsdp",
    "ModelParallelStrategy": "rlhf_fsdp",
    "DeepSpeedStrategy": "rlhf_deepspeed_stage_3",
}


# Class and options of each strategy name that a configuration can have.
REGISTERED: dict[str, tuple[str, dict[str, Any]]] = {
    "rlhf_single": ("RLHFSingleDeviceStrategy", {}),
    "rlhf_ddp": ("RLHFDDPStrategy", {}),
    "rlhf_fsdp": ("RLHFFSDPStrategy", {}),
    "rlhf_fsdp_offload": ("RLHFFSDPStrategy", {"cpu_offload": True}),
    "rlhf_deepspeed_stage_1": ("RLHFDeepSpeedStrategy", {"stage": 1}),
    "rlhf_deepspeed_stage_2": ("RLHFDeepSpeedStrategy", {"stage": 2}),
    "rlhf_deepspeed_stage_2_offload": ("RLHFDeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "rlhf_deepspeed_stage_3": ("RLHFDeepSpeedStrategy", {"stage": 3}),
    "rlhf_deepspeed_stage_3_offload": (
        "RLHFDeepSpeedStrategy",
        {"stage": 3, "offload_optimizer": True, "offload_params": True},
    ),
}


def unknown_strategy(name: str, strategy: str, known: Sequence[str]) -> str:
    """Return a message about the name of a strategy that is not known.

    Args:
        name: name in a configuration.
        strategy: result of :func:`our_name`, for a similar name; empty for a name that is not misspelt.
        known: names of the role strategies.
    """
    near = difflib.get_close_matches(strategy.lower(), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"trainer.strategy {name!r} is not available{hint} Available: auto, {', '.join(known)}"


def our_name(strategy: str, processes: int) -> str:
    """Return the role strategy for the name of a strategy of Lightning; other names are returned unchanged.

    Args:
        strategy: name in a configuration: ``auto``, ``ddp``, ``fsdp``, ``deepspeed_stage_2_offload``, ...
        processes: number of processes over all nodes.
    """
    name = strategy.lower()
    if name == "auto":
        return "rlhf_ddp" if processes > 1 else "rlhf_single"
    if name in ("single_device", "fsdp", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"):
        return f"rlhf_{name.partition('_')[0]}"
    if name == "fsdp_cpu_offload":
        return "rlhf_fsdp_offload"
    if name == "deepspeed":
        return "rlhf_deepspeed_stage_2"  # the stage of Lightning's own default
    if name.startswith("deepspeed_stage_") and not name.endswith("nvme"):
        return f"rlhf_{name}"
    return strategy
