"""All uses of private attributes of DeepSpeed's optimizers.

Checked against deepspeed 0.19.8; tests/strategies/test_deepspeed_private.py fails when a name is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.models.lora import base_name

_SHARED_MEMORY = Path("/dev/shm")


def gradient_norm(engine: Any) -> Tensor:
    """Return the norm of an engine's gradients over all ranks, before clipping and the step. All ranks.

    DeepSpeed computes the norm inside ``step()``, too late to skip the step.

    Args:
        engine: engine after the backward pass of its last micro-batch.

    Returns:
        Norm, not negative; infinite if any gradient is infinite or NaN.
    """
    norms = torch.stack([norm.detach().float() for norm in _norms(engine.optimizer)])
    # DeepSpeed returns -1 for a norm that is not finite.
    invalid = (norms < 0).any() | ~norms.isfinite().all()
    return torch.where(invalid, torch.inf, norms.norm())


def set_clipping(engine: Any, max_norm: float | None) -> None:
    """Set the norm to which the next ``step()`` clips gradients; None disables clipping."""
    engine.optimizer.clip_grad = 0.0 if max_norm is None else max_norm


def drop_gradients(engine: Any) -> None:
    """Clear an engine's gradients and its count of micro-batches without a change of weights or moments. All ranks.

    Calls ``step()`` with an optimizer that does nothing, because DeepSpeed clears both only there, and differently for
    each stage and offload setting. If gradients were cleared otherwise, stage 2 with an offloaded optimizer would add
    those of an earlier step to the next ones.

    Args:
        engine: engine after the backward pass of its last micro-batch.
    """
    zero = engine.optimizer
    optimizer, step = zero.optimizer, zero.optimizer.step
    # ZeRO-1 and ZeRO-2 register the optimizer's state in their first step; here there may not be any yet.
    linked = getattr(zero, "_hp_optimizer_states_linked", None)
    optimizer.step = lambda closure=None: None
    try:
        engine.step()
    finally:
        optimizer.step = step
    if linked is False:
        zero._hp_optimizer_states_linked = False


def unlink_shared_memory(rank: int) -> None:
    """Remove the name of the shared memory of DeepSpeed's all-reduce on CPUs, so that it is freed with its processes.

    DeepSpeed 0.19 never unlinks it: each process of each run would leave 66 MiB in /dev/shm.

    Args:
        rank: rank of this process. All processes must have opened the memory before.
    """
    suffix = "_".join((str(os.getuid()), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], str(rank)))
    (_SHARED_MEMORY / f"deepspeed_allreduce_buffer_{suffix}").unlink(missing_ok=True)


def spread(role: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Scatter rank 0's parameters over the processes, under ZeRO-3. All ranks.

    DeepSpeed's function for a whole module does not support modules on the meta device.

    Args:
        role: role with weights on rank 0, and on the meta device on other ranks.
        config: configuration of the role's engine.
        device: device of this rank, with memory for the largest parameter.
    """
    import deepspeed

    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)
    shards: dict[Tensor, nn.Parameter] = {}  # by the original parameter; tied parameters stay tied
    for module in role.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in shards:
                if parameter.is_meta:
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                else:
                    values = parameter.detach()
                # A new parameter, because another role may share this one.
                made = nn.Parameter(values, requires_grad=parameter.requires_grad)
                init._convert_to_zero_parameters([made])  # broadcasts rank 0's values, and keeps this rank's shard
                shards[parameter] = made
            setattr(module, key, shards[parameter])


def share_partitions(role: nn.Module, other: nn.Module) -> None:
    """Make the frozen parameters of a role use the partitions of another role, whose values are equal, under ZeRO-3.

    Args:
        role: result of :func:`spread`.
        other: role of the same source, after :func:`spread`.
    """
    partitions = {base_name(name): p for name, p in other.named_parameters() if not p.requires_grad}
    for name, parameter in role.named_parameters():
        partner: Any = partitions.get(base_name(name))
        if partner is not None and not parameter.requires_grad and partner.ds_shape == parameter.ds_shape:  # type: ignore[attr-defined]
            parameter.ds_tensor = partner.ds_tensor  # type: ignore[attr-defined]


def _norms(optimizer: Any) -> list[Tensor]:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # class of stage 1 with bfloat16 weights
    from deepspeed.runtime.utils import get_global_norm_of_tensors
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer._get_norm_groups())
    if isinstance(optimizer, BF16_Optimizer):
        return [get_global_norm_of_tensors(optimizer.get_grads_for_norm()[0], norm_type=optimizer.norm_type)]
    return [optimizer.scaled_global_norm()]
