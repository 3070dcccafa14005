"""DeepSpeed configurations: defaults, the user's settings, and the differences between roles."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lightning_rlhf.expected_errors import UsageError

_BUCKET = 500_000_000  # elements, DeepSpeed's default

# Settings of DeepSpeed that are taken from the module or the Trainer.
_SET_ELSEWHERE = {
    "optimizer": "the module's optimizer",
    "scheduler": "the module's scheduler",
    "gradient_clipping": "the module's max_grad_norm",
    "gradient_accumulation_steps": "the module's micro_batch_tokens",
    "fp16": "the Trainer's precision",
    "bf16": "the Trainer's precision",
    "torch_autocast": "the Trainer's precision",
}


def configuration(
    stage: int, offload_optimizer: bool, offload_params: bool, offload_frozen: bool, over: dict[str, Any]
) -> dict[str, Any]:
    """Return the configuration shared by the engines of all roles.

    Args:
        stage: ZeRO stage.
        offload_optimizer: whether the optimizer's state is on the CPU.
        offload_params: whether weights are on the CPU.
        offload_frozen: whether weights of frozen roles are on the CPU.
        over: user's settings, which take precedence; nested dictionaries are merged.

    Raises:
        ValueError: an argument contradicts another one or a setting of the module or the Trainer.
    """
    if stage not in (1, 2, 3):
        raise UsageError(f"stage must be 1, 2 or 3, got {stage}; use rlhf_ddp for training without sharding")
    if stage < 3 and (offload_params or offload_frozen):
        raise UsageError(f"DeepSpeed offloads weights in stage 3 only, got stage {stage}: use rlhf_deepspeed_stage_3")
    for key in over.keys() & _SET_ELSEWHERE.keys():
        raise UsageError(f"config must not contain {key!r}: set {_SET_ELSEWHERE[key]} instead")
    if "stage" in over.get("zero_optimization", {}):
        raise UsageError("config must not contain zero_optimization.stage: set the argument stage instead")
    zero: dict[str, Any] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = _on_cpu()
    if offload_params:
        zero["offload_param"] = _on_cpu()
    ours = {
        # Required by DeepSpeed, but used only in its throughput logs: the module splits its batches itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Allow any optimizer class.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return _merged(ours, over)


def of_role(shared: dict[str, Any], frozen: bool, offload_frozen: bool, bfloat16: bool) -> dict[str, Any]:
    """Return the configuration of one role's engine.

    Args:
        shared: configuration of all roles.
        frozen: whether the role is frozen and so has no optimizer.
        offload_frozen: whether the weights of a frozen role are on the CPU.
        bfloat16: whether the role computes in bfloat16; gradients are still accumulated in float32.
    """
    config = copy.deepcopy(shared)
    if bfloat16:
        precision = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config = _merged(precision, config)
    if frozen:
        zero = config["zero_optimization"]
        zero.pop("offload_optimizer", None)
        offload = zero.pop("offload_param", _on_cpu())
        if offload_frozen:
            zero["offload_param"] = offload
    return config


def with_bucket(config: dict[str, Any], learned: list[nn.Parameter]) -> dict[str, Any]:
    """Limit the gradient buffer to the size of the role's gradients; DeepSpeed's default has 5e8 elements.

    Args:
        config: configuration of a trained role; changed in place.
        learned: trained parameters of the role, sharded by ZeRO-3 or not.
    """
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in learned)
    config["zero_optimization"].setdefault("reduce_bucket_size", min(elements, _BUCKET))
    return config


def _on_cpu() -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge dictionaries recursively; values of ``above`` take precedence."""
    merged = {**below, **copy.deepcopy(above)}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _merged(below[key], above[key])
    return merged
