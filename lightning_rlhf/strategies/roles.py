"""The contract between a module and whatever spreads its models over devices.

The LightningModule itself is never wrapped; each of its roles (actor, critic, ref, reward_model) is. A role is only
ever called through :meth:`Roles.role`, from the training step, from callbacks and from validation alike.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_rlhf.strategies.single import LocalRoles


@runtime_checkable
class Roles(Protocol):
    """What a module asks of a strategy."""

    def role(self, name: str) -> Callable[..., Any]:
        """The callable that runs the role's forward."""

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``sync`` only on the last of a mini-batch."""

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """Clip the role's gradients to a global norm (None leaves them) and return the norm before clipping."""

    def step_role(self, name: str) -> None:
        """One optimizer step of a trained role, then gradients cleared."""

    def iter_full_params(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, full tensor), valid until the next one; every rank must exhaust it."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks that hold different data."""

    def max_over_ranks(self, value: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over the same ranks."""

    @property
    def gradient_scale(self) -> float:
        """What a local loss is multiplied by so that the strategy's reduction gives the gradient of the sum."""


def roles_of(module: LightningModule) -> Roles:
    """The roles of a module under its Trainer.

    Raises:
        RuntimeError: the strategy spreads work over processes but knows nothing of roles.
    """
    trainer: Trainer = module.trainer
    if isinstance(trainer.strategy, Roles):
        return trainer.strategy
    if trainer.world_size == 1:
        return LocalRoles(module)
    raise RuntimeError(
        f"{type(trainer.strategy).__name__} wraps the whole module, but actor, critic, reference and reward model "
        f"are trained and sharded one by one; run with devices=1 (strategy='auto')"
    )
