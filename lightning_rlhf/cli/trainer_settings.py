"""Settings of the Trainer that a run of this package cannot use, each refused with the name of the right one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlhf.strategies import registry  # noqa: F401 (names the strategies for the Trainer)
from lightning_rlhf.strategies.names import our_name
from lightning_rlhf.strategies.roles import RoleStrategy

_ELSEWHERE = {
    "gradient_clip_val": "gradients are clipped for each model by model.init_args.max_grad_norm: set that",
    "gradient_clip_algorithm": "gradients are clipped by their norm, to model.init_args.max_grad_norm: set that",
    "barebones": "it turns off the logging and the checkpoints that a run is made of: leave it out",
}
_CALLBACKS = {
    LearningRateFinder: "set model.init_args.actor_optimizer.init_args.lr",
    BatchSizeFinder: "set model.init_args.micro_batch_tokens, the tokens of one forward pass",
    StochasticWeightAveraging: "use lightning.pytorch.callbacks.EMAWeightAveraging",
}


def check_trainer(given: Mapping[str, Any]) -> None:
    """Validate the ``trainer`` section of a configuration before the Trainer is made.

    Args:
        given: the section's values, with callbacks as objects.

    Raises:
        ValueError: a setting belongs to automatic optimization, which is not used here, or would train nothing.
    """
    for name, instead in _ELSEWHERE.items():
        if given.get(name):
            raise ValueError(f"trainer.{name} is {given[name]!r}, but {instead}")
    accumulated = given.get("accumulate_grad_batches")
    if accumulated not in (None, 1):
        raise ValueError(
            f"trainer.accumulate_grad_batches is {accumulated}, but gradients are accumulated over micro-batches of "
            f"model.init_args.micro_batch_tokens tokens: lower that to save memory, and raise "
            f"data.init_args.batch_size for a larger batch"
        )
    if given.get("max_steps") == 0:
        raise ValueError("trainer.max_steps is 0, so nothing would be trained: give at least 1, or -1 for no limit")
    callbacks = given.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"{kind.__name__} works with one model under automatic optimization, and a run here has several "
                    f"models under manual optimization: {instead}"
                )


def checked_strategy(given: str, processes: int) -> str:
    """Return the role strategy that a name in a configuration stands for.

    Args:
        given: the name, such as ``auto``, ``ddp`` or ``rlhf_fsdp``.
        processes: number of processes over all nodes.

    Raises:
        ValueError: no role strategy has this name.
    """
    name = our_name(given, processes)
    known = [ours for ours in StrategyRegistry if issubclass(StrategyRegistry[ours]["strategy"], RoleStrategy)]
    if name in known:
        return name
    near = [] if given in StrategyRegistry else difflib.get_close_matches(name.lower(), known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"trainer.strategy {given!r} is not available{meant} Available: auto, {', '.join(known)}")
