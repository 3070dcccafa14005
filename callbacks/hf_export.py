"""HFExport: the trained model in the format everything else reads."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.models.loading import quiet_transformers
from lightning_rlhf.modules.role_module import RoleModule

from .exported import Origin, check_adapter, complete_export
from .module_check import check_module

log = logging.getLogger(__name__)


class HFExport(Callback):
    """Writes the trained model and its tokenizer to ``export/`` when training ends, and every n steps if asked.

    ``transformers``, vLLM and the configuration of another run load the directory.
    ``metrics.json`` in it holds the run's last metrics, ``README.md`` describes the origin of the model. The command
    ``export`` makes the same of a checkpoint.

    Args:
        every_n_steps: also write ``export-<step>/`` every so many steps; 0 only at the end.
        adapter: write LoRA adapters by themselves, for peft and vLLM to put onto the model they were trained on; else
            they are merged into its weights.
    """

    def __init__(self, every_n_steps: int = 0, adapter: bool = False) -> None:
        if every_n_steps < 0:
            raise ValueError(f"every_n_steps must be 0 (only at the end) or positive, got {every_n_steps}")
        self.every_n_steps, self.adapter = every_n_steps, adapter

    def setup(self, trainer: Trainer, pl_module: RoleModule, stage: str) -> None:
        """Raise if adapters alone cannot be exported."""
        check_module(self, pl_module, RoleModule)
        if self.adapter:
            check_adapter(pl_module, pl_module.trained_roles[0], "HFExport(adapter=True)")

    def on_train_start(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Remove an export that an earlier part of this run has written."""
        target = Path(trainer.default_root_dir) / "export"
        if not trainer.is_global_zero or trainer.fast_dev_run or 0 < trainer.max_steps <= trainer.global_step:
            return
        if not (target / "metrics.json").is_file():
            return
        step = json.loads((target / "metrics.json").read_text())["step"]
        older = target.with_name(f"export-{step}")
        shutil.rmtree(older, ignore_errors=True)
        target.rename(older)
        log.info("%s is of step %d: it is now %s, until this run has ended.", target, step, older)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RoleModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write when due."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0 and not trainer.fast_dev_run:
            self._write(trainer, pl_module, f"export-{trainer.global_step}")

    def on_fit_end(self, trainer: Trainer, pl_module: RoleModule) -> None:
        """Write the final model."""
        if not trainer.fast_dev_run:
            self._write(trainer, pl_module, "export")

    def _write(self, trainer: Trainer, module: RoleModule, name: str) -> None:
        target = Path(trainer.default_root_dir) / name
        draft = target.with_name(name + ".new")
        if trainer.is_global_zero:
            shutil.rmtree(draft, ignore_errors=True)
        with quiet_transformers():
            module.export(draft, trainer.is_global_zero, self.adapter)
        if not trainer.is_global_zero:
            return
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        config = target.parent / "config.yaml"
        origin = Origin(module, module.trained_roles[0], trainer.datamodule, config, trainer.global_step, metrics)
        complete_export(draft, origin, trainer.datamodule.tokenizer)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
