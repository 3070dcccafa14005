"""Host memory for models and optimizer states that are not in use, under strategies that do not shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies.roles import RoleStrategy

_NAMES = {"ref": "reference"}  # of roles, in messages


class OffloadsIdle(RoleStrategy):
    """Keeps frozen roles and optimizer states in host memory while the device does not need them.

    A frozen role is on the device from its first forward pass to that of another frozen role or to the first update.
    Optimizer states are there from a role's first step to the end of the step's updates. Values do not change.

    Attributes:
        offload_idle: whether to do this.
    """

    offload_idle = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._resident: str | None = None  # frozen role on the device
        self._host_weights: list[tuple[Tensor, Tensor]] = []  # its tensors and their data in host memory
        self._stored_states: dict[str, list[tuple[dict[str, Tensor], str]]] = {}  # entries of optimizer states by role

    @override
    def build_role(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """See :meth:`RoleStrategy.build_role`.

        Raises:
            ValueError: roles are to be offloaded, but the module uses frozen ones in its updates.
        """
        if self.offload_idle and self.module.uses_frozen_in_updates:
            frozen = self.module.frozen_roles[0]
            raise UsageError(
                f"offload_idle moves frozen models to host memory between phases of a step, but "
                f"{type(self.module).__name__} uses its {_NAMES.get(frozen, frozen)} in every micro-batch: set "
                f"offload_idle to false"
            )
        return super().build_role(name, build)

    def model_to_device(self) -> None:
        """Move the module to the device, without frozen roles if they are offloaded."""
        names = self.module.frozen_roles if self.offload_idle else ()
        frozen = {name: self.module._modules.pop(name) for name in names}
        super().model_to_device()  # type: ignore[misc]
        self.module._modules.update(frozen)
        for name in frozen:
            for tensor in self._idle_tensors(name):
                set_data(tensor, _host_copy(tensor))

    def role(self, name: str) -> Callable[..., Any]:
        """Return the callable of a role, with its weights on the device."""
        if self.offload_idle and name in self.module.frozen_roles:
            self._load_frozen(name)
        return super().role(name)

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Move frozen roles to host memory before an update."""
        self._load_frozen(None)
        return super().accumulate(name, sync)

    def step_role(self, name: str) -> None:
        """Take an optimizer step with the state of the optimizer on the device."""
        for state, key in self._stored_states.pop(name, []):
            state[key] = state[key].to(self._device, non_blocking=True)
        super().step_role(name)

    def end_phase(self) -> None:
        """Move frozen roles and optimizer states to host memory."""
        if not self.offload_idle:
            return
        self._load_frozen(None)
        optimizers = self.optimizers  # type: ignore[attr-defined]  # none in a validation without training
        for name, optimizer in zip(self.module.trained_roles, optimizers, strict=False):
            states = self._stored_states.setdefault(name, [])
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.device == self._device:
                        states.append((state, key))
                        state[key] = _host_copy(value)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies to page-locked memory are asynchronous

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        return device

    def _idle_tensors(self, name: str) -> list[Tensor]:
        """Return the tensors of a frozen role that no trained role shares."""
        trained = {id(tensor) for role in self.module.trained_roles for tensor in _tensors(getattr(self.module, role))}
        return [tensor for tensor in _tensors(getattr(self.module, name)) if id(tensor) not in trained]

    def _load_frozen(self, name: str | None) -> None:
        """Move one frozen role to the device and the others off it; None moves all off it."""
        if name == self._resident:
            return
        for tensor, host in self._host_weights:
            set_data(tensor, host)
        self._resident = name
        self._host_weights = []
        if name is not None:
            self._host_weights = [(tensor, tensor.data) for tensor in self._idle_tensors(name)]
        for tensor, host in self._host_weights:
            set_data(tensor, host.to(self._device, non_blocking=True))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which is page-locked where there is a GPU."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return host.copy_(tensor.detach(), non_blocking=True)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Set the values of a tensor, which may be on another device then; tied weights stay tied."""
    tensor.data = data
