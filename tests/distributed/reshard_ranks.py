"""Functions of ranks for test_resharding.py: read a checkpoint, write it immediately, train one step, write again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_rlhf.strategies.registry  # noqa: F401
from lightning_rlhf.callbacks import KLControl, RunState
from lightning_rlhf.objectives.kl_controllers import AdaptiveKL
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.role_files import StoredRole
from tests.distributed.tasks import parts, strategy_of
from tests.stand_ins import quiet_trainer

ROWS = 4  # of 13: three batches make an epoch, and checkpoints are taken inside one


class SaveAt(Callback):
    """Saves a checkpoint at the start of training and at its end."""

    def __init__(self, again: str | None, write: str | None) -> None:
        self.again, self.write = again, write

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.again:
            trainer.save_checkpoint(self.again)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.write:
            trainer.save_checkpoint(self.write)


def walk(runs: list[dict[str, Any]]) -> None:
    """Execute the runs in order.

    Args:
        runs: dictionaries of ``strategy``, ``steps`` at the end, ``options`` (``kind``, and of the module), and
            optionally ``read`` (checkpoint to resume from), ``again`` (path to write it immediately), ``write`` (path
            of the final checkpoint).
    """
    for run in runs:
        _walk(**run)


def _walk(
    strategy: Any,
    steps: int,
    options: dict[str, Any],
    read: str | None = None,
    again: str | None = None,
    write: str | None = None,
) -> None:
    L.seed_everything(7, verbose=False)
    torch.use_deterministic_algorithms(True)
    kind = options.pop("kind", "ppo")
    module, data, callbacks = parts(kind, rows=ROWS, **options)
    if kind == "ppo":
        callbacks.append(KLControl(AdaptiveKL(target=0.1, horizon=32)))
    callbacks += [RunState(), SaveAt(again, write)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(
            strategy=strategy_of(strategy),
            devices=int(os.environ["WORLD_SIZE"]),
            default_root_dir=folder,
            max_steps=steps,
            max_epochs=-1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            callbacks=callbacks,
        )
        trainer.fit(module, datamodule=data, ckpt_path=read)


def roles(path: str | Path) -> dict[str, Any]:
    """Return the unsharded tensors and the optimizer settings of all roles in a checkpoint."""
    result = {}
    for folder in sorted(entry for entry in manifest.verified(Path(path)).iterdir() if entry.is_dir()):
        role = StoredRole(folder)
        tensors = {key: torch.zeros(role.shapes[key], dtype=role.dtypes[key]) for key in role.shapes}
        role.read(tensors)
        result[folder.name] = (tensors, role.settings)
    return result


def rest(path: str | Path) -> dict[str, Any]:
    """Return the state outside of the roles: the step, schedules, callbacks, and the position in the data."""
    state = torch.load(manifest.verified(Path(path)) / "state.pt", weights_only=True)
    loader = state["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return {key: state[key] for key in ("global_step", "lr_schedulers", "callbacks")} | {"place": loader}


def bits_that_differ(one: str | Path, other: str | Path) -> str | None:
    """Return the first difference between two checkpoints, or None if they are equal."""
    ours, theirs = roles(one), roles(other)
    if ours.keys() != theirs.keys():
        return f"roles {sorted(ours)} and {sorted(theirs)}"
    for role, (tensors, settings) in ours.items():
        others, other_settings = theirs[role]
        if odd := sorted(tensors.keys() ^ others.keys()):
            return f"only one has {role} {odd[0]}"
        for key, tensor in tensors.items():
            if tensor.dtype != others[key].dtype or not torch.equal(tensor, others[key]):
                return f"{role} {key}"
        if settings != other_settings:
            return f"{role}: settings of the optimizer"
    ours, theirs = rest(one), rest(other)
    return next((key for key in ours if ours[key] != theirs[key]), None)


def largest_weight_difference(one: str | Path, other: str | Path) -> float:
    """Return the largest absolute difference of any weight between two checkpoints."""
    ours, theirs = roles(one), roles(other)
    return max(
        float((tensor.double() - theirs[role][0][key].double()).abs().max())
        for role, (tensors, _) in ours.items()
        for key, tensor in tensors.items()
        if key.startswith("model.")
    )
