"""Backward and step through the engine of the role that is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer


class RolePrecision(DeepSpeedPrecision):
    """DeepSpeed's precision, with the engine of the role that is meant; neither inputs nor modules are cast by it.

    Roles are cast as they are built, and computations of the module, such as losses, stay in float32.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return it unchanged."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return it unchanged."""
        return data

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *, engine: Any
    ) -> None:
        """Run the backward pass of the engine, which reduces gradients."""
        engine.backward(tensor, scale_wrt_gas=False)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], *, engine: Any
    ) -> None:
        """Run the hooks and the engine's step, which clears gradients too."""
        closure()
        self._after_closure(model, optimizer)
        engine.step()
