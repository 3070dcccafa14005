"""The state of a role that DeepSpeed shards, in the form of all strategies; uses private attributes of DeepSpeed.

Checked against deepspeed 0.19.8; tests/strategies/test_zero_state.py fails when a name is missing. ZeRO lays
the parameters of a group end to end, in float32, and cuts them into flat pieces, one or several per rank; the optimizer
knows nothing but these. Here each parameter is gathered, one at a time, and rank ``i % world`` keeps the ones that it
writes, so that no rank ever holds a whole role.
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
    """Where ZeRO keeps the float32 parameters and the optimizer's state of a role.

    Args:
        zero: the optimizer of a DeepSpeedEngine.

    Raises:
        ValueError: its state cannot be accessed.
    """

    def __init__(self, zero: Any) -> None:
        self.zero, self.inner = zero, zero.optimizer
        self._of: dict[int, tuple[Tensor, int]] = {}
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            refuse_swapped(zero)
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
            raise UsageError(
                f"{type(zero).__name__} of DeepSpeed keeps its state in a way that no checkpoint can be made of: take "
                f"ZeRO stage 1, 2 or 3"
            )
        for parameters, flat, group in pieces:
            self._of |= {id(parameter): (flat, group) for parameter in parameters}

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._of

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of the piece with this rank's part of the parameter."""
        state: dict[str, Any] = self.inner.state[self._of[id(parameter)][0]]
        return state

    def flat_of(self, parameter: Tensor) -> Tensor:
        """Return the piece."""
        return self._of[id(parameter)][0]

    def groups(self, named: dict[str, Tensor]) -> list[list[str]]:
        """Return the names of the parameters of each group of the optimizer."""
        groups: list[list[str]] = [[] for _ in self.inner.param_groups]
        for name, tensor in named.items():
            if tensor in self:
                groups[self._of[id(tensor)][1]].append(name)
        return groups

    def write(self, parameter: Tensor, value: Tensor, key: str | None = None) -> None:
        """Put this rank's part of a whole float32 parameter, or of one of its states, into its place."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            if key is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's own setter fails on the last rank where the number of elements does not divide.
        part, _ = self.zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
        start = part.numel() * ranks.rank()
        own = value.flatten()[start : start + part.numel()]
        part.data[: own.numel()].copy_(own)

    def link(self) -> None:
        """Register new optimizer state with ZeRO-1 and ZeRO-2, as their first step does."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero._lazy_init_hp_params_optimizer_state()

    def hand_on(self) -> None:
        """Copy the float32 parameters to those that forward sees, as the end of a step does."""
        if not isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)


def refuse_swapped(zero: Any) -> None:
    """Refuse a ZeRO-3 optimizer with state on an NVMe disk, or of which a part stays on the GPU.

    Args:
        zero: the optimizer of a stage-3 engine.

    Raises:
        ValueError: where its state is.
    """
    if zero.swap_optimizer:
        raise UsageError(
            "DeepSpeed keeps the optimizer's state on NVMe, where no checkpoint can be made of it: set "
            "zero_optimization.offload_optimizer.device to cpu"
        )
    if zero.offload_optimizer and {*zero.subgroup_to_device.values()} != {"cpu"}:
        raise UsageError(
            "DeepSpeed keeps part of the optimizer's state on the GPU and part on the CPU, of which no checkpoint can "
            "be made: set zero_optimization.offload_optimizer.ratio to 1.0"
        )


def zero_state(module: nn.Module, zero: Any) -> RoleState:
    """Return the state of a role: each rank has different parameters, whole and in float32. All ranks.

    Args:
        module: module of the role.
        zero: the optimizer of its DeepSpeedEngine; None writes only weights.
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
    """Return the whole weight and state of one parameter. All ranks."""
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
    """Load a stored role into a module that DeepSpeed shards, from any strategy. All ranks.

    Args:
        module: module of the role.
        zero: the optimizer of its DeepSpeedEngine; None reads only weights.
        folder: folder of the role.

    Raises:
        ValueError: weights or optimizer are of another kind of run.
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
        pieces.hand_on()
        for group, values in zip(pieces.inner.param_groups, settings, strict=True):
            group.update(values)


def _shape(tensor: Tensor) -> torch.Size:
    return tensor.ds_shape if is_zero_param(tensor) else tensor.shape  # type: ignore[attr-defined]


def _make_state(pieces: _Pieces, named: dict[str, Tensor], stored: StoredRole) -> None:
    """Create the state of a first step: zeros for each moment, and the numbers that the parameters of a piece share."""
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
                    f"the {stored.folder.name}'s {name} has {kind} {number} in the checkpoint and {other} has {known}: "
                    f"DeepSpeed keeps one for both, so this checkpoint can be resumed under rlhf_single, rlhf_ddp or "
                    f"rlhf_fsdp"
                )
            of_torch = type(pieces.inner).__module__.startswith("torch.")
            state[kind] = scalar[key] if of_torch else int(number)  # DeepSpeed's own count in Python
    pieces.link()


def _broadcast(stored: StoredRole, key: str, source: int, device: torch.device) -> Tensor:
    value = torch.zeros(stored.shapes[key], dtype=stored.dtypes[key], device=device)
    if ranks.rank() == source:
        stored.read({key: value})
    if ranks.is_distributed():
        dist.broadcast(value, source)
    return value
