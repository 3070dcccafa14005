"""The state of a role that torch itself spreads: a plain module, one under DDP, one sharded by FSDP2 or cut by TP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, StoredRole

# How a step is computed and not what; they follow from this run's devices.
_OF_THE_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of activation checkpointing
_ADAM = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")  # keep the same state


def native_state(module: nn.Module, optimizer: Optimizer | None) -> RoleState:
    """Return the state of a role; tensors are this rank's shards, not copies.

    Args:
        module: module of the role.
        optimizer: optimizer of the role; None writes only weights.

    Raises:
        ValueError: the optimizer's state cannot be given to another number of ranks.
    """
    weights = owned_tensors(module)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    if optimizer is None:
        return RoleState(tensors, None)
    names = {id(tensor): name for name, tensor in weights.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = names[id(parameter)]
            tensors[f"optim.state.{name}.{key}"] = storable(optimizer, key, value, parameter.shape)
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return RoleState(tensors, settings_of(optimizer, groups))


def native_load(module: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Load a stored role into a module and its optimizer, from any strategy.

    Args:
        module: module of the role.
        optimizer: optimizer of the role; None reads only weights.
        folder: folder of the role.

    Raises:
        ValueError: weights or optimizer are of another kind of run.
    """
    stored = StoredRole(folder)
    weights = owned_tensors(module)
    stored.check_weights({name: tensor.shape for name, tensor in weights.items()})
    wanted = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    names = {id(tensor): name for name, tensor in weights.items()}
    states: dict[int, dict[str, Tensor]] = {}
    if optimizer is not None:
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        settings = merged_settings(optimizer, groups, stored)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            keys = stored.state_of(names[id(parameter)])
            states[number] = {kind: _empty(stored, key, parameter) for kind, key in keys.items()}
            wanted |= {key: states[number][kind] for kind, key in keys.items()}
    stored.read(wanted)
    if optimizer is not None:
        own = optimizer.state_dict()["param_groups"]
        groups_now = [{**group, **values} for group, values in zip(own, settings, strict=True)]
        not_empty = {number: state for number, state in states.items() if state}
        optimizer.load_state_dict({"state": not_empty, "param_groups": groups_now})


def owned_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a role's state by their ``state_dict`` names: trained parameters and persistent buffers.

    Tied ones come once, by the first name. What LoRA leaves as it was is in the role's source.

    Asking for the state also makes FSDP put parameters back that a forward has left whole.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            seen.add(id(tensor))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            tensors[name] = tensor
    return tensors


def _empty(stored: StoredRole, key: str, parameter: Tensor) -> Tensor:
    if stored.shapes[key] == parameter.shape:
        return torch.zeros_like(parameter.detach())
    return torch.zeros(stored.shapes[key], dtype=stored.dtypes[key])


# -- the optimizer's settings ------------------------------------------------------------------------------------------


def settings_of(optimizer: Optimizer, groups: list[list[str]]) -> dict[str, Any]:
    """Return class and groups of an optimizer as plain values.

    Args:
        optimizer: optimizer of the groups.
        groups: names of the parameters of each of its groups.
    """
    plain = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    named = [{**values, "params": names} for values, names in zip(plain, groups, strict=True)]
    return {"optimizer": type(optimizer).__name__, "param_groups": named}


def merged_settings(optimizer: Optimizer, groups: list[list[str]], stored: StoredRole) -> list[dict[str, Any]]:
    """Return the stored settings of an optimizer's groups.

    Args:
        optimizer: optimizer of this run.
        groups: names of the parameters of each of its groups.
        stored: stored role with its settings.

    Returns:
        For each group, the stored values of the settings that it has.

    Raises:
        ValueError: missing settings, another optimizer, or other groups of parameters.
    """
    role = stored.folder.name
    settings = stored.settings
    ours = type(optimizer).__name__
    if settings is None:
        raise UsageError(f"the checkpoint has weights of the {role} and no optimizer: it cannot be trained on")
    theirs = settings["optimizer"]
    if theirs != ours and not (theirs in _ADAM and ours in _ADAM):
        raise UsageError(
            f"the {role} was optimized by {theirs} when the checkpoint was written, and now by {ours}: configure "
            f"{theirs}, or start a new run from the exported model"
        )
    merged = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        of = [old for old in settings["param_groups"] if set(names) <= set(old["params"])]
        if not of:
            raise UsageError(
                f"the {role}'s parameters lie in other groups of the optimizer than when the checkpoint was written: "
                f"configure the groups of then, or start a new run from the exported model"
            )
        values = {key: value for key, value in of[0].items() if key in group and key not in _OF_THE_RUN}
        merged.append({key: _as(group[key], value) for key, value in values.items()})
    return merged


def _as(present: Any, value: Any) -> Any:
    if isinstance(present, Tensor):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(present, tuple) else value


def storable(optimizer: Optimizer, key: str, value: Any, shape: torch.Size) -> Tensor:
    """Return a value of an optimizer's state as it is stored: shaped as its parameter, or a number.

    Args:
        optimizer: optimizer, for the message.
        key: key of the value, for example ``exp_avg``.
        value: a tensor or a number.
        shape: shape of the whole parameter.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    if isinstance(value, Tensor) and (value.shape == shape or value.ndim == 0):
        return value.detach()
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"{type(optimizer).__name__} keeps {what} as {key!r} of a parameter of shape {tuple(shape)}, which a "
        f"checkpoint could not give to another number of processes: take an optimizer whose state has the shape of "
        f"its parameters, as torch.optim.AdamW or torch.optim.SGD"
    )


def check_optimizer(make: Callable[[list[nn.Parameter]], Optimizer], device: torch.device) -> None:
    """Refuse, before training, an optimizer that cannot be made or whose state could not be given to other ranks.

    It is made for a small parameter and stepped once, and its state looked at.

    Args:
        make: factory of the optimizer.
        device: device of the trial.

    Raises:
        ValueError: invalid settings, or a state that cannot be stored.
    """
    parameter = nn.Parameter(torch.ones(64, 128, device=device))
    try:
        optimizer = make([parameter])
    except ValueError as error:
        raise UsageError(f"an optimizer cannot be made as it is configured: {error}") from error
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for key, value in optimizer.state[parameter].items():
        storable(optimizer, key, value, parameter.shape)
