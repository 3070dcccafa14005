"""One process: each role is the plain module."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_rlhf.compat import step_optimizer


class LocalRoles:
    """The role contract in one process, for any strategy with a single device.

    Args:
        module: has one attribute per role, and ``trained_roles`` in the order of its optimizers.
    """

    gradient_scale = 1.0

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module

    def role(self, name: str) -> Callable[..., Any]:
        """The module of that role."""
        return getattr(self._module, name)

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Nothing to synchronise."""
        return nullcontext()

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """See :class:`lightning_rlhf.strategies.roles.Roles`."""
        parameters = [p for p in getattr(self._module, name).parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)

    def step_role(self, name: str) -> None:
        """See :class:`lightning_rlhf.strategies.roles.Roles`."""
        step_optimizer(self._module, self._module.trained_roles.index(name))

    def iter_full_params(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Parameters under the names of ``save_pretrained``, tied ones once."""
        for parameter_name, parameter in getattr(self._module, name).lm.named_parameters():
            yield parameter_name, parameter.detach()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    def max_over_ranks(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value
