"""Linear layers of a role whose float32 products on a CPU are those of the faster library."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_rlhf.functional.products import linear


class Linear(nn.Linear):
    """``torch.nn.Linear`` that multiplies by :func:`~lightning_rlhf.functional.products.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer of (..., in_features) states."""
        return linear(input, self.weight, self.bias)


def use_faster_products(model: nn.Module) -> None:
    """Change the class of a model's linear layers to :class:`Linear`; subclasses of ``torch.nn.Linear`` stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
