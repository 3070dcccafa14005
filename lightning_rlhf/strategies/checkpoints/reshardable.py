"""One kind of checkpoint for all role strategies: written by any, on any number of ranks, and read by any other."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rlhf.expected_errors import NonFiniteError, UsageError
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints import manifest, remote
from lightning_rlhf.strategies.checkpoints.background import BackgroundSave, SaveOptions, in_host_memory
from lightning_rlhf.strategies.checkpoints.io import load_plain
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, write_role
from lightning_rlhf.strategies.checkpoints.role_state import native_load, native_state

_REST = "state.pt"
_FETCHED = "fetched.ckpt"  # a copy from a URL while it is loaded


class ReshardableCheckpoints:
    """Checkpoints as folders: one per trained role, and a file with the other state.

    ::

        last.ckpt/manifest.json                     see :mod:`lightning_rlhf.strategies.checkpoints.manifest`
        last.ckpt/v000007/actor/*.safetensors       weights and optimizer, each rank its part
        last.ckpt/v000007/actor/optimizer.json      the optimizer's class and settings
        last.ckpt/v000007/state.pt                  loops, schedulers, callbacks, other tensors of the module

    Frozen roles are not written: their source is in the configuration. To be put in front of one of Lightning's
    strategies, whose module has ``trained_roles``, ``frozen_roles`` and one attribute per role.
    """

    replicates_roles = False  # whether every rank has each role whole, so that the first one alone writes a copy
    restore_checkpoint_after_setup = True  # when models are spread and optimizers made
    lightning_restore_optimizer = False

    @cached_property
    def save_options(self) -> dict[Path, SaveOptions]:
        """How to save each checkpoint, by its folder; set by the callbacks that save."""
        return {}

    @cached_property
    def _background(self) -> BackgroundSave:
        return BackgroundSave()

    # -- what another way of spreading a role overrides -------------------------------------------------------

    @property
    def optimizer_device(self) -> torch.device:
        """Where optimizers step."""
        return self.root_device  # type: ignore[attr-defined]

    def role_state(self, name: str) -> RoleState:
        """Return the state of a trained role. All ranks."""
        return native_state(getattr(self._owner, name), self._optimizer(name))

    def load_role_state(self, name: str, folder: Path) -> None:
        """Load the state of a trained role; its optimizer only in a fit. All ranks."""
        native_load(getattr(self._owner, name), self._optimizer(name), folder)

    # -- called by the Trainer, on all ranks ----------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: SaveOptions | None = None
    ) -> None:
        """Write a new version of the checkpoint; the previous one stays intact if this fails.

        A save that is still running in the background is waited for first.

        Args:
            checkpoint: the state beside the roles.
            filepath: folder of the checkpoint.
            storage_options: options of the save; None takes those in :attr:`save_options` for the folder.

        Raises:
            FloatingPointError: a weight or an optimizer's state is not finite; nothing is written.
            OSError: a rank could not write.
            ValueError: a file is in the way, or an optimizer's state cannot be given to other ranks.
        """
        self.finish_saving()
        path = Path(filepath)
        options = storage_options or self.save_options.get(path, SaveOptions())
        rest = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        if not options.background:
            version = manifest.begin(path, options.above)
            for name in self._owner.trained_roles:
                write_role(version / name, self._checked_state(name))
            _finish(rest, version, options, checkpoint["global_step"])
            return
        # Everything that training changes is copied before it continues.
        states = {name: self._checked_state(name) for name in self._owner.trained_roles}
        copied = not self.replicates_roles or ranks.rank() == 0
        states = {name: in_host_memory(state, copied) for name, state in states.items()}
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        self._background.start(lambda: _save(path, states, buffer.getvalue(), options, checkpoint["global_step"]))

    def finish_saving(self, wait: bool = True) -> None:
        """Wait for a save in the background. All ranks.

        Args:
            wait: False returns at once where the save is not done yet.

        Raises:
            OSError, ValueError: as :meth:`save_checkpoint`.
        """
        self._background.finish(wait)

    def _checked_state(self, name: str) -> RoleState:
        def look() -> RoleState:
            state = self.role_state(name)
            check_finite(name, state, self._owner.trainer.global_step)
            return state

        return ranks.raise_on_all_ranks(look)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the roles of a checkpoint and return the other state.

        Args:
            checkpoint_path: its folder, one of its kept versions, or the URL of a copy.
            weights_only: ignored; only tensors and plain values are ever loaded.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            ValueError: it is incomplete, damaged, or of another kind of run.
        """
        self.finish_saving()
        if not remote.is_url(checkpoint_path):
            return self._load(Path(checkpoint_path))
        folder = Path(self._owner.trainer.default_root_dir) / "checkpoints" / _FETCHED
        ranks.on_first_rank(lambda: remote.download(str(checkpoint_path), folder))
        try:
            return self._load(folder)
        finally:
            ranks.on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _load(self, path: Path) -> dict[str, Any]:
        version = manifest.verified(path)
        stored = {folder.name for folder in version.iterdir() if folder.is_dir()}
        trained = self._owner.trained_roles
        missing, odd = [name for name in trained if name not in stored], sorted(stored - set(trained))
        if missing or (odd and self._fitting):
            raise UsageError(
                f"the checkpoint {path} holds {', '.join(sorted(stored))}, and this run trains "
                f"{', '.join(trained)}: it was written by another kind of run"
            )
        # Not raise_on_all_ranks: if one rank fails, the others wait in collectives, and are ended by the failure watch.
        for name in trained:
            self.load_role_state(name, version / name)
        rest = ranks.raise_on_all_ranks(lambda: load_plain(version / _REST))
        if lost := sorted({"global_step", "loops", "state_dict", "callbacks"} - rest.keys()):
            raise UsageError(
                f"the checkpoint {path} is damaged: {_REST} has no {lost[0]!r}, which every run writes; resume from "
                f"another"
            )
        return rest

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; one that is half removed counts for nothing."""

        def remove() -> None:
            (Path(filepath) / manifest.NAME).unlink(missing_ok=True)
            if Path(filepath).is_dir():
                shutil.rmtree(filepath)

        ranks.on_first_rank(remove)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the module outside of its roles."""
        owner = self._owner
        prefixes = tuple(f"{name}." for name in (*owner.trained_roles, *owner.frozen_roles))
        return {name: value for name, value in owner.state_dict().items() if not name.startswith(prefixes)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Put that back.

        Raises:
            ValueError: the module has other tensors.
        """
        if "averaging_state" in checkpoint:
            raise UsageError(
                "the checkpoint was written with weight averaging, whose average of several models cannot be put back "
                "under this strategy: start a new run from the export, which holds the average"
            )
        ours, theirs = self.lightning_module_state_dict(), checkpoint["state_dict"]
        if odd := sorted(ours.keys() ^ theirs.keys()):
            where = "the checkpoint" if odd[0] in theirs else "this run's module"
            raise UsageError(f"only {where} has {odd[0]}: the checkpoint was written by another kind of run")
        self._owner.load_state_dict(theirs, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: optimizers are saved with their roles."""
        return {}

    # -----------------------------------------------------------------------------------------------------------

    @property
    def _owner(self) -> Any:
        return self.lightning_module  # type: ignore[attr-defined]

    @property
    def _fitting(self) -> bool:
        return bool(self._owner.trainer.state.fn == TrainerFn.FITTING)

    def _optimizer(self, name: str) -> Optimizer | None:
        if not self._fitting:
            return None
        optimizers: list[Optimizer] = self.optimizers  # type: ignore[attr-defined]
        return optimizers[self._owner.trained_roles.index(name)]


def check_finite(role: str, state: RoleState, step: int) -> None:
    """Refuse to write weights, or an optimizer's state, that are not finite.

    Args:
        role: name of it.
        state: this rank's part.
        step: step of the checkpoint.

    Raises:
        FloatingPointError: the first tensor with such a value.
    """
    for key, tensor in state.tensors.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.is_floating_point() and not torch.isfinite(own).all():
            count = int((~torch.isfinite(own)).sum())
            raise NonFiniteError(
                f"{count} values of {key.removeprefix('model.')} of the {role} are not finite after step {step}, so no "
                f"checkpoint is written and the one before stays: lower the learning rate, or look at the rewards"
            )


def _save(path: Path, states: dict[str, RoleState], rest: bytes, options: SaveOptions, step: int) -> None:
    """Write copies of all roles as a new version. All ranks."""
    version = manifest.begin(path, options.above)
    for name, state in states.items():
        write_role(version / name, state)
    _finish(rest, version, options, step)


def _finish(rest: dict[str, Any] | bytes, version: Path, options: SaveOptions, step: int) -> None:
    """Write the state beside the roles and make the version count. All ranks."""

    def write() -> None:
        with (version / _REST).open("wb") as file:
            if isinstance(rest, bytes):
                file.write(rest)
            else:
                torch.save(rest, file)

    ranks.on_first_rank(write)
    manifest.publish(version, options.keep, step)
    if options.published is not None and ranks.rank() == 0:
        options.published(version)
