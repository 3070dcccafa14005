"""Which settings of optimizers and schedules are in force after a resume: the checkpoint's, whatever is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_rlhf.modules.role_module import RoleModule

# How a step is computed, and not what.
_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
Settings = dict[str, dict[str, Any]]


def settings_of(trainer: Trainer, module: RoleModule) -> Settings:
    """The settings of each optimizer and schedule as they are now, by what a sentence calls it.

    Args:
        trainer: with its optimizers.
        module: whose trained roles they belong to, in their order.
    """
    found: Settings = {}
    for role, optimizer in zip(module.trained_roles, trainer.strategy.optimizers, strict=False):
        group = {name: value for name, value in optimizer.param_groups[0].items() if name not in _HOW}
        group["lr"] = group.pop("initial_lr", group.get("lr"))  # a schedule moves the rate; this is what it moves from
        if "max_momentum" in group:  # a cycle moves these too
            group = {name: value for name, value in group.items() if name not in ("betas", "momentum")}
        found[f"{type(optimizer).__name__} of the {role}"] = group
    scheduled = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    for role, scheduler in zip(module.trained_roles, scheduled, strict=False):
        own, given = scheduler.state_dict(), inspect.signature(type(scheduler)).parameters
        kept = {name: value for name, value in own.items() if name in given and name != "last_epoch"}
        found[f"{type(scheduler).__name__} of the {role}"] = kept
    return found


def rates(trainer: Trainer, module: RoleModule) -> str:
    """The learning rate of each role in the step to come."""
    optimizers = zip(module.trained_roles, trainer.strategy.optimizers, strict=False)
    return ", ".join(f"{role} {float(optimizer.param_groups[0]['lr']):g}" for role, optimizer in optimizers)


def overruled(asked: Settings, used: Settings) -> list[str]:
    """A sentence for each setting that is asked for and not used, because the checkpoint has another.

    Args:
        asked: before the checkpoint's were put in their place.
        used: afterwards.
    """
    told = []
    for who, settings in asked.items():
        for name, wanted in settings.items():
            kept = used.get(who, {}).get(name)
            if not _same(wanted, kept):
                told.append(f"{who}: {name} {kept} from the checkpoint is used, {wanted} was asked for")
    return told


def check_schedules(asked: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]) -> None:
    """Refuse schedules of other kinds than those of the checkpoint: their state would be nonsense to each other.

    Args:
        asked: the state of each as it was made, in the order of the roles.
        kept: likewise, in the checkpoint.

    Raises:
        ValueError: another number of them, or another kind.
    """
    if [set(state) for state in asked] != [set(state) for state in kept]:
        counts = f"{len(kept)} in the checkpoint, {len(asked)} asked for"
        raise ValueError(
            f"the learning-rate schedules are of other kinds than those of the checkpoint ({counts}), and cannot go on "
            f"from it: configure those of then, or start a new run from an export, whose optimizers begin anew"
        )


def _same(one: Any, other: Any) -> bool:
    pairs = isinstance(one, list | tuple) and isinstance(other, list | tuple)
    return list(one) == list(other) if pairs else bool(one == other)
