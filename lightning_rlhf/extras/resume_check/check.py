"""Compares a resumed run with its checkpoint before anything large is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_rlhf.callbacks.records.run_reader import RunMeter
from lightning_rlhf.callbacks.survival.run_settings import changes, run_settings
from lightning_rlhf.callbacks.survival.run_state import RunState
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.io import load_plain
from lightning_rlhf.strategies.checkpoints.role_files import StoredRole
from lightning_rlhf.strategies.checkpoints.role_state import check_same_optimizer

_STATE = "state.pt"  # in a version of a checkpoint


class ResumeCheck(RunMeter):
    """Tells you that a checkpoint does not fit the run before the engine starts and the models load.

    It looks at data, seed, batch size, optimizers and the rank of adapters, in the checkpoint's small files. Whatever
    else differs, and a checkpoint that is no folder on this machine, is compared when the checkpoint is loaded.
    """

    def setup(self, trainer: Any, pl_module: RoleModule, stage: str) -> None:
        """Compare the run with its checkpoint.

        Raises:
            UsageError: the checkpoint does not fit.
        """
        version = _version(trainer.ckpt_path)
        if stage == "fit" and version is not None:
            ranks.raise_on_all_ranks(lambda: _check(version, trainer, pl_module))


def _check(version: Path, trainer: Any, module: RoleModule) -> None:
    try:
        settings = load_plain(version / _STATE).get("lightning_rlhf", {}).get("settings", {})
        folders = (version / role for role in module.trained_roles)
        stored = {folder.name: StoredRole(folder) for folder in folders if folder.is_dir()}
    except (OSError, UsageError):  # loading the checkpoint says what is damaged
        return
    changed = changes(settings, run_settings(trainer, module)) if settings else {}
    for state in (callback for callback in trainer.callbacks if isinstance(callback, RunState)):
        state.check_rows(changed)
    for role, files in stored.items():
        _check_optimizer(files, module)
        _check_adapters(role, files, module)


def _version(path: Any) -> Path | None:
    """Return the folder of a checkpoint's current version, or of the version that a path names; None elsewhere."""
    folder = Path(str(path))
    if path is None or "://" in str(path) or not folder.is_dir():
        return None
    if manifest.is_version(folder.name):
        return folder
    kept = manifest.kept_versions(folder)
    return folder / kept[0] if kept else None


def _check_optimizer(stored: StoredRole, module: RoleModule) -> None:
    if stored.settings is not None:
        role = stored.folder.name
        make, _ = module.optimizer_of(role)
        optimizer = make([nn.Parameter(torch.ones(64, 128))])
        check_same_optimizer(role, stored.settings["optimizer"], type(optimizer).__name__)


def _check_adapters(role: str, stored: StoredRole, module: RoleModule) -> None:
    """Raise if the stored adapters have another rank; those of experts are stored together."""
    inputs = {name: shape for name, shape in stored.shapes.items() if ".lora_A." in name and name.startswith("model.")}
    ranks_stored = {shape[0] for name, shape in inputs.items() if ".experts" not in name}
    lora = module.sources[role].lora
    trained = None if lora is None else lora.rank
    if ranks_stored and ranks_stored != {trained}:
        ours = "has none" if trained is None else f"sets rank {trained}"
        raise UsageError(
            f"the {role}'s adapters have rank {', '.join(map(str, sorted(ranks_stored)))} in the checkpoint, and this "
            f"run {ours}: set lora as it was, or start a new run from the exported model"
        )
    if not inputs and trained is not None:
        raise UsageError(
            f"the checkpoint has all weights of the {role} and no adapters, and this run sets lora: remove it, or "
            f"start a new run from the exported model"
        )
