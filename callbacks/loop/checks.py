"""Checks that several callbacks make."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.modules.rlhf import RLHFModule, TrainedStep


def tensor_ranks(trainer: Trainer, module: RLHFModule) -> int:
    """Return the number of ranks that split each tensor of a model and have the same prompts."""
    return trainer.world_size // module.data_ranks.size


def check_module(callback: Callback, module: LightningModule, kind: type[LightningModule]) -> None:
    """Validate the class of the module that a callback is used with.

    Raises:
        ValueError: the module is not derived from ``kind``.
    """
    if not isinstance(module, kind):
        raise UsageError(
            f"{type(callback).__name__} needs a lightning_rlhf {kind.__name__} (PPOModule, GRPOModule, ...), got "
            f"{type(module).__name__}: remove the callback"
        )


def last_step_of(callback: Callback, module: RLHFModule) -> TrainedStep:
    """Return the last training step of a module, for a callback that needs it.

    Raises:
        RuntimeError: the module's ``training_step`` has not set it.
    """
    if module.last_step is None:
        raise RunError(
            f"{type(callback).__name__} needs the results of the step, but training_step of {type(module).__name__} "
            f"does not set last_step: call finish_rollout in it, or remove the callback"
        )
    return module.last_step
