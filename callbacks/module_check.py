"""Check of the module that a callback is used with."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule


def check_module(callback: Callback, module: LightningModule, kind: type[LightningModule]) -> None:
    """Validate that a module has the attributes that a callback reads.

    Args:
        callback: a callback of this package.
        module: module of the run.
        kind: class that the module must be derived from.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(module, kind):
        raise ValueError(
            f"{type(callback).__name__} works with a lightning_rlhf {kind.__name__} (PPOModule, GRPOModule, ...), got "
            f"{type(module).__name__}: leave the callback out"
        )
