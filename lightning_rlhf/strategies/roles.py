"""The contract between a module and whatever spreads its models over devices.

The LightningModule itself is never wrapped; each of its roles (actor, critic, ref, reward_model) is. A role is only
ever called through :meth:`RoleStrategy.role`, from the training step, from callbacks and from validation alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_rlhf.compat import step_optimizer, trainer_of
from lightning_rlhf.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.models.lora import base_name, is_adapter, merged
from lightning_rlhf.models.tensors import kept_buffers
from lightning_rlhf.strategies.names import OURS

T = TypeVar("T")


class RoleStrategy:
    """What a module asks of a strategy; as it stands, in one process.

    Strategies inherit from it beside one of Lightning's and override what several processes need. Every method that
    all ranks take part in says so: it must be called on every rank, in the same order.
    """

    data_ranks: DataRanks = ONE_RANK  # this process among those with different data
    activation_checkpointing = False  # whether a trained role keeps only its layers' inputs and computes the rest again
    gradient_scale = 1.0  # what a local loss is multiplied by so that the reduction gives the gradient of the sum

    @property
    def module(self) -> Any:
        """The module: one attribute per role, ``trained_roles`` in the order of its optimizers, ``frozen_roles``."""
        return self.lightning_module  # type: ignore[attr-defined]

    def build_role(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a role where and how its weights are to lie. All ranks.

        Args:
            name: of the role.
            build: loads or makes the model, in the mode and with the gradients it is to have.
        """
        return build()

    def role(self, name: str) -> Callable[..., Any]:
        """The callable that runs the role's forward; the only way to call a model. Calling it: all ranks."""
        called: Callable[..., Any] = getattr(self.module, name)
        return called

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``sync`` only on the last of a mini-batch."""
        return nullcontext()

    def backward_role(self, name: str, loss: Tensor) -> None:
        """Add the gradients of a loss to those of a trained role. All ranks."""
        self.module.manual_backward(loss)

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """Clip the role's gradients to a global norm (None leaves them); the norm before clipping. All ranks."""
        parameters = [p for p in getattr(self.module, name).parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)

    def step_role(self, name: str) -> None:
        """One optimizer step of a trained role, then gradients cleared. All ranks."""
        step_optimizer(self.module, self.module.trained_roles.index(name))

    def iter_full_params(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, whole tensor), tied ones once, each valid until the next; all ranks exhaust it.

        Adapters are merged: these are the weights of a model that computes the same without them. Buffers that are
        saved with a model come last.
        """
        lm = getattr(self.module, name).lm
        yield from merged(lm, self.iter_own_params(name))
        yield from kept_buffers(lm)  # every rank has them whole

    def iter_own_params(self, name: str, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name in the model, whole tensor): the same with adapters by themselves, under peft's names.

        Args:
            name: of the role.
            wanted: which names; the others are not brought together. None wants all.
        """
        for parameter_name, parameter in getattr(self.module, name).lm.named_parameters():
            if wanted is None or wanted(parameter_name):
                yield parameter_name, parameter.detach()

    def iter_adapters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Of :meth:`iter_own_params` the adapters alone."""
        return self.iter_own_params(name, is_adapter)

    def iter_base_params(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, whole tensor) of the model without its adapters."""
        for parameter_name, parameter in self.iter_own_params(name, lambda key: not is_adapter(key)):
            yield base_name(parameter_name), parameter
        yield from kept_buffers(getattr(self.module, name).lm)

    @property
    def is_group_leader(self) -> bool:
        """Whether this process is the one that :meth:`run_on_group_leader` asks."""
        return True

    def run_on_group_leader(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on the first of the ranks that have this share of the data, for all of them. All ranks.

        Args:
            make: gives what would not be the same everywhere, or costs money; anything that can be pickled.
        """
        return make()


class SingleDeviceRoles(RoleStrategy):
    """The contract for a strategy of Lightning's own with a single device.

    Args:
        module: whose roles they are.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    @property
    def module(self) -> Any:
        """The module."""
        return self._module


def role_strategy_of(module: LightningModule) -> RoleStrategy:
    """The roles of a module under its Trainer; without one, in this process.

    Raises:
        RuntimeError: the strategy spreads work over processes but knows nothing of roles.
    """
    trainer = trainer_of(module)
    if trainer is not None and isinstance(trainer.strategy, RoleStrategy):
        return trainer.strategy
    if trainer is None or trainer.world_size == 1:
        return SingleDeviceRoles(module)
    name = type(trainer.strategy).__name__
    raise RuntimeError(
        f"{name} wraps the whole module, but actor, critic, reference and reward model are trained and sharded one by "
        f"one: take strategy={OURS.get(name, 'rlhf_ddp')!r}"
    )
