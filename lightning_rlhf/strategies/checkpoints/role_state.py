"""Save and load the state of a role in plain torch: unsharded, or under DDP, FSDP2 or tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, StoredRole

# Settings that depend on this run's devices; they are not restored.
_NOT_RESTORED = ("params", "foreach", "fused", "capturable", "differentiable")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and activation checkpointing
_OF_PART = ":"  # between the kind of a value and one of its parts, in the keys of files
_ADAM = ("Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam")  # optimizers with the same kind of state


def native_state(module: nn.Module, optimizer: Optimizer | None, frozen: bool = False) -> RoleState:
    """Return the state of a role; tensors are this rank's shards, not copies.

    Args:
        module: module of the role.
        optimizer: optimizer of the role; None returns only weights.
        frozen: argument of :func:`owned_tensors`.

    Raises:
        ValueError: the optimizer's state cannot be resharded to another number of ranks.
    """
    weights = owned_tensors(module, frozen)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    if optimizer is None:
        return RoleState(tensors, None)
    names = {id(tensor): name for name, tensor in weights.items()}
    for parameter, state in optimizer.state.items():
        name, is_whole = names[id(parameter)], not isinstance(parameter, DTensor)
        for key, value in state.items():
            checked = storable(optimizer, key, value, parameter.shape, is_whole)
            for kind, tensor in _plain_parts(key, checked).items():
                tensors[f"optim.state.{name}.{kind}"] = tensor
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return RoleState(tensors, settings_of(optimizer, groups))


def native_load(module: nn.Module, optimizer: Optimizer | None, folder: Path, frozen: bool = False) -> None:
    """Load a role, saved under any strategy, into a module and its optimizer.

    Args:
        module: module of the role.
        optimizer: optimizer of the role; None loads only weights.
        folder: folder of the role.
        frozen: argument of :func:`owned_tensors`.

    Raises:
        ValueError: weights or optimizer do not match those of this run.
    """
    stored = StoredRole(folder)
    weights = owned_tensors(module, frozen)
    stored.check_weights({name: tensor.shape for name, tensor in weights.items()})
    wanted = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    names = {id(tensor): name for name, tensor in weights.items()}
    states: dict[int, dict[str, Tensor]] = {}
    if optimizer is not None:
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        settings = merged_settings(optimizer, groups, stored)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds = {kind for parameter in parameters for kind in stored.state_of(names[id(parameter)])}
        if any(_OF_PART in kind for kind in kinds):
            _create_state(optimizer)
        for number, parameter in enumerate(parameters):
            keys = stored.state_of(names[id(parameter)])
            whole = {kind: _empty(stored, key, parameter) for kind, key in keys.items() if _OF_PART not in kind}
            in_parts = {kind.partition(_OF_PART)[0] for kind in keys if _OF_PART in kind}
            states[number] = whole | {kind: optimizer.state[parameter][kind] for kind in in_parts}
            parts = {
                part: tensor for kind in in_parts for part, tensor in _plain_parts(kind, states[number][kind]).items()
            }
            wanted |= {key: (whole | parts)[kind] for kind, key in keys.items()}
    stored.read(wanted)
    if optimizer is not None:
        groups = optimizer.state_dict()["param_groups"]
        groups_now = [{**group, **values} for group, values in zip(groups, settings, strict=True)]
        not_empty = {number: state for number, state in states.items() if state}
        optimizer.load_state_dict({"state": not_empty, "param_groups": groups_now})
        if type(optimizer).__module__.startswith("bitsandbytes."):  # passes the number of steps to C
            for state in optimizer.state.values():
                state["step"] = int(state["step"])


def owned_tensors(module: nn.Module, frozen: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a role's state by their ``state_dict`` names: trained parameters and persistent buffers.

    Tied tensors are returned once, under their first name. Weights that LoRA freezes are left out: the role's source
    has them. As a side effect, ``state_dict`` makes FSDP reshard parameters that are still gathered.

    Args:
        frozen: whether to return parameters that are not trained too.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (frozen or tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            seen.add(id(tensor))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            tensors[name] = tensor
    return tensors


def _plain_parts(kind: str, value: Tensor) -> dict[str, Tensor]:
    """Return a value of an optimizer's state by its kind, or the tensors of which it consists by kind and name.

    Args:
        kind: kind of the value, for example ``exp_avg``.
        value: a tensor, or one that wraps others, such as the codes and scales of torchao's states.
    """
    if isinstance(value, DTensor) or not is_traceable_wrapper_subclass(value):
        return {kind: value}
    names, _ = value.__tensor_flatten__()
    return {f"{kind}{_OF_PART}{name}": getattr(value, name) for name in names}


def _create_state(optimizer: Optimizer) -> None:
    """Create the state of an optimizer by a step without gradients, at learning rate 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _empty(stored: StoredRole, key: str, parameter: Tensor) -> Tensor:
    dtype = stored.dtypes[key]
    if stored.shapes[key] == parameter.shape and dtype.is_floating_point:
        return torch.zeros_like(parameter.detach())
    if stored.shapes[key].numel() > 1 and isinstance(parameter, DTensor):
        raise UsageError(
            f"the checkpoint has {key.rpartition('.')[2]} of an optimizer in {dtype}, which cannot be resharded: "
            f"resume with rlhf_single or rlhf_ddp"
        )
    return torch.zeros(stored.shapes[key], dtype=dtype)


# -- the optimizer's settings ------------------------------------------------------------------------------------------


def settings_of(optimizer: Optimizer, groups: list[list[str]]) -> dict[str, Any]:
    """Return class and groups of an optimizer as plain values.

    Args:
        optimizer: optimizer of the groups.
        groups: parameter names of each group.
    """
    plain = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    named = [{**values, "params": names} for values, names in zip(plain, groups, strict=True)]
    return {"optimizer": type(optimizer).__name__, "param_groups": named}


def check_same_optimizer(role: str, stored: str, configured: str) -> None:
    """Raise if an optimizer, named by its class, cannot load the state of a checkpoint's."""
    if stored != configured and not (stored in _ADAM and configured in _ADAM):
        raise UsageError(
            f"the {role} was optimized by {stored} when the checkpoint was written, and now by {configured}: configure "
            f"{stored}, or start a new run from the exported model"
        )


def merged_settings(optimizer: Optimizer, groups: list[list[str]], stored: StoredRole) -> list[dict[str, Any]]:
    """Return the stored settings of an optimizer's groups.

    Args:
        groups: parameter names of each group.
        stored: stored role with its settings.

    Returns:
        For each group, the stored values of its settings.

    Raises:
        ValueError: settings are missing, or the class or the groups of the optimizer differ.
    """
    role = stored.folder.name
    settings = stored.settings
    if settings is None:
        raise UsageError(f"the checkpoint has weights of the {role} but no optimizer, so training cannot resume")
    check_same_optimizer(role, settings["optimizer"], type(optimizer).__name__)
    merged = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        matching_groups = [old for old in settings["param_groups"] if set(names) <= set(old["params"])]
        if not matching_groups:
            raise UsageError(
                f"the optimizer groups of the {role} differ from those in the checkpoint: configure the same groups, "
                f"or start a new run from the exported model"
            )
        values = {key: value for key, value in matching_groups[0].items() if key in group and key not in _NOT_RESTORED}
        merged.append({key: _as(group[key], value) for key, value in values.items()})
    return merged


def _as(present: Any, value: Any) -> Any:
    if isinstance(present, Tensor):
        return torch.full_like(present, value)
    if isinstance(present, tuple):
        return tuple(value)
    return value


def storable(optimizer: Optimizer, key: str, value: Any, shape: torch.Size, is_whole: bool = False) -> Tensor:
    """Return a value of an optimizer's state as a tensor.

    Args:
        optimizer: optimizer, for the message.
        key: key of the value, for example ``exp_avg``.
        value: a tensor or a number.
        shape: shape of the full parameter.
        is_whole: whether the process has the full parameter; its state may then have other shapes, such as the scales
            of states in 8 bits.

    Raises:
        ValueError: the value has another shape than the parameter, which is not whole, or another type.
    """
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    consists_of_others = isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)
    if consists_of_others and not isinstance(value, DTensor):
        is_storable = is_whole
    else:
        is_storable = isinstance(value, Tensor) and (value.shape == shape or value.ndim == 0)
    if is_storable:
        return value.detach()
    if type(value) is Tensor and is_whole:
        return (
            value.detach().clone()
        )  # parameters may share it, as those of bitsandbytes do with their quantization map
    if isinstance(value, Tensor) and not consists_of_others:
        what = f"a tensor of shape {tuple(value.shape)}"
    else:
        what = f"a {type(value).__name__}"
    raise UsageError(
        f"{type(optimizer).__name__} keeps {what} as {key!r} of a parameter of shape {tuple(shape)}, which cannot be "
        f"resharded to another number of processes: use rlhf_single or rlhf_ddp, or an optimizer whose state has the "
        f"shape of its parameters, such as torch.optim.AdamW or torch.optim.SGD"
    )


def check_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer],
    device: torch.device,
    keeps_matrices: bool = True,
    keeps_whole_weights: bool = True,
) -> None:
    """Raise for an optimizer that cannot be constructed, needs other parameters, or whose state cannot be resharded.

    A trial instance takes one step on a small parameter.

    Args:
        make: factory of the optimizer.
        device: device of the trial.
        keeps_matrices: whether the strategy gives matrices to the optimizer, not flat pieces of them.
        keeps_whole_weights: whether every process has whole weights.

    Raises:
        ValueError: invalid settings, an optimizer of matrices for flat pieces, or a state that cannot be stored.
    """
    parameter = nn.Parameter(torch.ones(64, 128, device=device))
    try:
        optimizer = make([parameter])
    except ValueError as error:
        raise UsageError(f"the optimizer's settings are invalid: {error}") from None
    if not keeps_matrices and (isinstance(optimizer, Muon) or hasattr(optimizer, "needs_matrices")):
        raise UsageError(
            f"{type(optimizer).__name__} needs whole matrices, which DeepSpeed divides into flat pieces: use rlhf_fsdp "
            f"or rlhf_ddp, or another optimizer such as torch.optim.AdamW"
        )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for key, value in optimizer.state[parameter].items():
        storable(optimizer, key, value, parameter.shape, keeps_matrices and keeps_whole_weights)
