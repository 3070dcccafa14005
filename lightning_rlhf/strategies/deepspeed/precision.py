"""Precision plugin that runs backward passes and steps through a role's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer


class RolePrecision(DeepSpeedPrecision):
    """DeepSpeed's precision plugin with the engine as an argument, and without casts of inputs and modules.

    Roles are cast when they are built; computations of the module, such as losses, stay in float32.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the input unchanged."""
        return data

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *, engine: Any
    ) -> None:
        """Run the engine's backward pass, which also reduces gradients."""
        engine.backward(tensor, scale_wrt_gas=False)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], *, engine: Any
    ) -> None:
        """Run Lightning's hooks and the engine's step, which also clears gradients."""
        closure()
        self._after_closure(model, optimizer)
        engine.step()
