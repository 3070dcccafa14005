"""FrozenHeap: Python's garbage collector does not read the objects of the libraries again and again during training."""

from __future__ import annotations

import gc

from lightning.pytorch import Callback, LightningModule, Trainer


class FrozenHeap(Callback):
    """Freezes the objects that exist when a fit starts, until it ends.

    After torch, transformers and Lightning are imported, a full collection takes about 0.2 seconds, and it comes at any
    step and on each rank at another one, while the others wait. Garbage of the training itself is collected as before.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect once, so that no garbage is kept, and freeze what is left, unless your program froze objects."""
        self._is_ours = gc.get_freeze_count() == 0
        if self._is_ours:
            gc.collect()
            gc.freeze()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give all objects back to the collector, which can then free the models of the run."""
        if self._is_ours:
            gc.unfreeze()
        self._is_ours = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Do the same for a run that fails."""
        self.on_train_end(trainer, pl_module)
