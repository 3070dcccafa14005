"""Names of the role strategies, and the mapping from Lightning's strategy names to them."""

from __future__ import annotations

# Role strategies that correspond to Lightning's strategy classes.
OURS = {
    "SingleDeviceStrategy": "rlhf_single",
    "DDPStrategy": "rlhf_ddp",
    "FSDPStrategy": "rlhf_fsdp",
    "ModelParallelStrategy": "rlhf_fsdp",
    "DeepSpeedStrategy": "rlhf_deepspeed_stage_3",
}


def our_name(strategy: str, processes: int) -> str:
    """Return the role strategy for the name of a strategy of Lightning; other names are returned unchanged.

    Args:
        strategy: name in a configuration: ``auto``, ``ddp``, ``fsdp``, ``deepspeed_stage_2_offload``, ...
        processes: number of processes over all nodes.
    """
    name = strategy.lower()
    if name == "auto":
        return "rlhf_ddp" if processes > 1 else "rlhf_single"
    if name in ("single_device", "fsdp", "ddp"):
        return f"rlhf_{name.removesuffix('_device')}"
    if name in ("ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"):
        return "rlhf_ddp"
    if name == "fsdp_cpu_offload":
        return "rlhf_fsdp_offload"
    if name == "deepspeed":
        return "rlhf_deepspeed_stage_2"  # the stage of Lightning's own default
    if name.startswith("deepspeed_stage_") and not name.endswith("nvme"):
        return f"rlhf_{name}"
    return strategy
