"""Save and load the state of a role sharded by DeepSpeed, in the format of all strategies.

Uses private attributes of DeepSpeed, checked against 0.19.8; tests/strategies/test_zero_state.py fails when a name is
missing. ZeRO concatenates the parameters of a group in float32 and splits them into flat pieces, one or several per
rank, which are the parameters of the optimizer. A checkpoint has one tensor per model parameter: parameters are
gathered one at a time, and rank ``i % world_size`` keeps parameter ``i``, so that no rank needs memory for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, StoredRole
from lightning_rlhf.strategies.checkpoints.role_state import merged_settings, owned_tensors, settings_of, storable


class _Pieces:
    """The flat pieces of a role's float32 parameters, and their optimizer state.

    Args:
        zero: ZeRO optimizer of a DeepSpeedEngine.

    Raises:
        ValueError: the class or an offload setting of the optimizer is not supported.
    """

    def __init__(self, zero: Any) -> None:
        self.zero, self.inner = zero, zero.optimizer
        self._of: dict[int, tuple[Tensor, int]] = {}
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            check_offload(zero)
            numbers = zero.sub_group_to_group_id
            pieces = [
                (zero.fp16_groups[i], flat, numbers[i]) for i, flat in enumerate(zero.fp32_partitioned_groups_flat)
            ]
        elif isinstance(zero, DeepSpeedZeroOptimizer):
            flats = zero.single_partition_of_fp32_groups
            pieces = [(zero.bit16_groups[i], flat, i) for i, flat in enumerate(flats)]
        elif isinstance(zero, BF16_Optimizer):
            flats = zero.fp32_groups_flat_partition
            pieces = [(zero.bf16_groups[i], flat, i) for i, flat in enumerate(flats)]
        else:
            raise UsageError(f"checkpoints do not support DeepSpeed's {type(zero).__name__}: use ZeRO stage 1, 2 or 3")
        for parameters, flat, group in pieces:
            self._of |= {id(parameter): (flat, group) for parameter in parameters}

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._of

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer state of the piece that contains this rank's part of a parameter."""
        state: dict[str, Any] = self.inner.state[self._of[id(parameter)][0]]
        return state

    def flat_of(self, parameter: Tensor) -> Tensor:
        """Return the piece that contains this rank's part of a parameter."""
        return self._of[id(parameter)][0]

    def groups(self, named: dict[str, Tensor]) -> list[list[str]]:
        """Return the parameter names of each optimizer group."""
        groups: list[list[str]] = [[] for _ in self.inner.param_groups]
        for name, tensor in named.items():
            if tensor in self:
                groups[self._of[id(tensor)][1]].append(name)
        return groups

    def write(self, parameter: Tensor, value: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a full float32 parameter, or of its optimizer state ``key``."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            if key is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's setter fails on the last rank if the world size does not divide the number of elements.
        part, _ = self.zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        start = part.numel() * ranks.rank()
        values = value.flatten()[start : start + part.numel()]
        part.data[: values.numel()].copy_(values)

    def link(self) -> None:
        """Register new optimizer state with ZeRO-1 and ZeRO-2, as their first step does."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero._lazy_init_hp_params_optimizer_state()

    def update_model(self) -> None:
        """Copy the float32 parameters to the model's parameters, as at the end of a step."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)


def check_offload(zero: Any) -> None:
    """Raise for a ZeRO-3 optimizer whose state is on NVMe or only partly offloaded.

    Args:
        zero: ZeRO optimizer of a stage-3 engine.

    Raises:
        ValueError: the optimizer's state is on NVMe, or partly on the GPU and partly on the CPU.
    """
    if zero.swap_optimizer:
        raise UsageError(
            "checkpoints do not support optimizer state on NVMe: set zero_optimization.offload_optimizer.device to cpu"
        )
    if zero.offload_optimizer and {*zero.subgroup_to_device.values()} != {"cpu"}:
        raise UsageError(
            "checkpoints do not support optimizer state that is partly on the GPU and partly on the CPU: set "
            "zero_optimization.offload_optimizer.ratio to 1.0"
        )


def zero_state(module: nn.Module, zero: Any) -> RoleState:
    """Return the state of a role, with full float32 tensors of different parameters on each rank. All ranks.

    Args:
        module: module of the role.
        zero: ZeRO optimizer of the role's DeepSpeedEngine; None returns only weights.
    """
    named = owned_tensors(module)
    tensors: dict[str, Tensor] = {}
    pieces = None if zero is None else _Pieces(zero)
    for number, (name, tensor) in enumerate(named.items()):
        values = _values(name, tensor, pieces)
        if number % ranks.world_size() == ranks.rank():
            tensors |= {key: value.detach().to("cpu", copy=True) for key, value in values.items()}
        del values
    settings = None if pieces is None else settings_of(pieces.inner, pieces.groups(named))
    return RoleState(tensors, settings, copied=True)


def _values(name: str, tensor: Tensor, pieces: _Pieces | None) -> dict[str, Tensor]:
    """Return the full weight and optimizer state of one parameter. All ranks."""
    if pieces is None or tensor not in pieces:
        with deepspeed.zero.GatheredParameters([tensor], enabled=is_zero_param(tensor)):
            return {f"model.{name}": tensor.detach().clone()}
    values = {f"model.{name}": safe_get_full_fp32_param(tensor)}
    shape, flat = values[f"model.{name}"].shape, pieces.flat_of(tensor)
    for key, value in pieces.state_of(tensor).items():
        is_piece = isinstance(value, Tensor) and value.shape == flat.shape
        whole = safe_get_full_optimizer_state(tensor, key) if is_piece else value
        values[f"optim.state.{name}.{key}"] = storable(pieces.inner, key, whole, shape)
    return values


def zero_load(module: nn.Module, zero: Any, folder: Path) -> None:
    """Load a role, saved under any strategy, into a module sharded by DeepSpeed. All ranks.

    Args:
        module: module of the role.
        zero: ZeRO optimizer of the role's DeepSpeedEngine; None loads only weights.
        folder: folder of the role.

    Raises:
        ValueError: weights or optimizer do not match those of this run.
    """
    stored, named = StoredRole(folder), owned_tensors(module)
    stored.check_weights({name: _shape(tensor) for name, tensor in named.items()})
    pieces = None if zero is None else _Pieces(zero)
    if pieces is not None:
        settings = merged_settings(pieces.inner, pieces.groups(named), stored)
        _make_state(pieces, named, stored)
    for number, (name, tensor) in enumerate(named.items()):
        source = number % ranks.world_size()
        weight = _broadcast(stored, f"model.{name}", source, tensor.device)
        if pieces is None or tensor not in pieces:
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0, enabled=is_zero_param(tensor)):
                if ranks.rank() == 0 or not is_zero_param(tensor):
                    tensor.data.copy_(weight)
            continue
        pieces.write(tensor, weight)
        for kind, key in stored.state_of(name).items():
            value = _broadcast(stored, key, source, tensor.device)
            if value.ndim:
                pieces.write(tensor, value, kind)
    if pieces is not None:
        pieces.update_model()
        for group, values in zip(pieces.inner.param_groups, settings, strict=True):
            group.update(values)


def _shape(tensor: Tensor) -> torch.Size:
    if is_zero_param(tensor):
        shape: torch.Size = tensor.ds_shape  # type: ignore[attr-defined]
        return shape
    return tensor.shape


def _make_state(pieces: _Pieces, named: dict[str, Tensor], stored: StoredRole) -> None:
    """Create optimizer state as after a first step: zero moments, and the stored scalars, one per piece.

    Raises:
        ValueError: parameters of one piece have different scalars in the checkpoint.
    """
    numbers: dict[tuple[int, str], tuple[str, float]] = {}
    for name, tensor in named.items():
        for kind, key in stored.state_of(name).items() if tensor in pieces else ():
            state, flat = pieces.state_of(tensor), pieces.flat_of(tensor)
            if stored.shapes[key]:
                if kind not in state:
                    state[kind] = torch.zeros_like(flat)
                continue
            scalar = {key: torch.zeros((), dtype=stored.dtypes[key])}
            stored.read(scalar)
            number = scalar[key].item()
            other, known = numbers.setdefault((id(flat), kind), (name, number))
            if known != number:
                raise UsageError(
                    f"in the checkpoint, {kind} of the {stored.folder.name}'s {name} is {number}, and {other}'s is "
                    f"{known}, but DeepSpeed keeps one {kind} for both: use rlhf_single, rlhf_ddp or rlhf_fsdp"
                )
            of_torch = type(pieces.inner).__module__.startswith("torch.")
            if of_torch:  # DeepSpeed's optimizers count steps in Python
                state[kind] = scalar[key]
            else:
                state[kind] = int(number)
    pieces.link()


def _broadcast(stored: StoredRole, key: str, source: int, device: torch.device) -> Tensor:
    value = torch.zeros(stored.shapes[key], dtype=stored.dtypes[key], device=device)
    if ranks.rank() == source:
        stored.read({key: value})
    if ranks.is_distributed():
        dist.broadcast(value, source)
    return value
