"""The checkpoint format of all role strategies; a run may resume with another strategy or number of ranks."""

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
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.background import BackgroundSave, SaveOptions, in_host_memory
from lightning_rlhf.strategies.checkpoints.io import is_url, load_plain, url_copies
from lightning_rlhf.strategies.checkpoints.role_files import RoleState, write_role
from lightning_rlhf.strategies.checkpoints.role_state import native_load, native_state

_OTHER_STATE = "state.pt"
_FETCHED = "fetched.ckpt"  # temporary copy of a checkpoint from a URL


class ReshardableCheckpoints:
    """Mixin that saves checkpoints as folders: one per trained role, and a file with the other state.

    ::

        last.ckpt/manifest.json                     see :mod:`lightning_rlhf.strategies.checkpoints.manifest`
        last.ckpt/v000007/actor/*.safetensors       weights and optimizer state, sharded by rank
        last.ckpt/v000007/actor/optimizer.json      the optimizer's class and settings
        last.ckpt/v000007/state.pt                  loops, schedulers, callbacks, other tensors of the module

    Frozen roles are not saved, because their source is in the configuration, unless a callback changes them and says so
    in ``stored_frozen_roles``. The mixin precedes a strategy of Lightning in the
    bases of a class, and requires a module with ``trained_roles``, ``frozen_roles`` and one attribute per role.
    """

    replicates_roles = False  # whether every rank has a full copy of each role, so that only rank 0 saves it
    keeps_matrices = True  # whether optimizers step on parameters with the shapes of the model, not on flat pieces
    stored_frozen_roles: tuple[str, ...] = ()  # those that the run changes, so that checkpoints need them
    restore_checkpoint_after_setup = True  # after models are sharded and optimizers constructed
    lightning_restore_optimizer = False

    @cached_property
    def save_options(self) -> dict[Path, SaveOptions]:
        """Save options by checkpoint folder; set by the callbacks that save."""
        return {}

    @cached_property
    def _background(self) -> BackgroundSave:
        return BackgroundSave()

    # -- overridden by strategies that shard differently ------------------------------------------------------

    @property
    def optimizer_device(self) -> torch.device:
        """Device on which optimizers step."""
        return self.root_device  # type: ignore[attr-defined]

    def role_state(self, name: str) -> RoleState:
        """Return the state of a trained role, or the weights of a frozen one. All ranks."""
        return native_state(getattr(self._owner, name), self._optimizer(name), name in self.stored_frozen_roles)

    def load_role_state(self, name: str, folder: Path) -> None:
        """Load the state of a role, with its optimizer only when fitting. All ranks."""
        native_load(getattr(self._owner, name), self._optimizer(name), folder, name in self.stored_frozen_roles)

    # -- called by the Trainer, on all ranks ----------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: SaveOptions | None = None
    ) -> None:
        """Write a new version of the checkpoint; the previous one stays intact if this fails.

        Waits first for a save that is still running in the background.

        Args:
            checkpoint: state other than the roles.
            filepath: folder of the checkpoint.
            storage_options: options of the save; None uses those in :attr:`save_options` for the folder.

        Raises:
            FloatingPointError: a weight or an optimizer's state is not finite; nothing is written.
            OSError: a rank could not write.
            ValueError: the path is a file, or an optimizer's state cannot be resharded.
        """
        self.finish_saving()
        path = Path(filepath)
        options = storage_options or self.save_options.get(path, SaveOptions())
        rest = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        if not options.background:
            version = manifest.begin(path, options.above)
            for name in self._stored:
                write_role(version / name, self._checked_state(name))
            with ranks.over(self._background.group()):
                _finish(rest, version, options, checkpoint["global_step"])
            return
        # Copy everything that training changes before it continues.
        states = {name: self._checked_state(name) for name in self._stored}
        copied = not self.replicates_roles or ranks.rank() == 0
        states = {name: in_host_memory(state, copied) for name, state in states.items()}
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        self._background.start(lambda: _save(path, states, buffer.getvalue(), options, checkpoint["global_step"]))

    def finish_saving(self, wait: bool = True) -> None:
        """Wait for a save in the background and raise its error, if any. All ranks.

        Args:
            wait: whether to wait; False returns at once if the save is still running.

        Raises:
            OSError, ValueError: errors of :meth:`save_checkpoint`.
        """
        self._background.join(wait)

    def _checked_state(self, name: str) -> RoleState:
        def checked_state() -> RoleState:
            state = self.role_state(name)
            check_finite(name, state, self._owner.trainer.global_step)
            return state

        return ranks.raise_on_all_ranks(checked_state)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the roles of a checkpoint and return the other state.

        Args:
            checkpoint_path: folder of the checkpoint or of one of its versions, or the URL of a copy.
            weights_only: ignored; always only tensors and plain values are loaded.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            ValueError: the checkpoint is incomplete, damaged, or does not match this run.
        """
        self.finish_saving()
        if not is_url(checkpoint_path):
            return self._load(Path(checkpoint_path))
        folder = Path(self._owner.trainer.default_root_dir) / "checkpoints" / _FETCHED
        with ranks.over(self._background.group()):
            ranks.on_first_rank(lambda: url_copies().download(str(checkpoint_path), folder))
        try:
            state = self._load(folder)
        except BaseException:  # perhaps of one rank, while the others are in collectives
            if ranks.rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        ranks.on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
        return state

    def _load(self, path: Path) -> dict[str, Any]:
        version = manifest.verified(path)
        stored = {folder.name for folder in version.iterdir() if folder.is_dir()}
        missing = set(self._stored) - stored
        unexpected = stored - set(self._stored)
        if missing or (unexpected and self._fitting):
            raise UsageError(
                f"the checkpoint {path} contains {', '.join(sorted(stored))}, but this run changes "
                f"{', '.join(self._stored)}: use the module and configuration that wrote it"
            )
        # Not in raise_on_all_ranks: loading uses collectives. If one rank fails, the failure watch ends the others.
        for name in self._stored:
            self.load_role_state(name, version / name)
        other_state = ranks.raise_on_all_ranks(lambda: load_plain(version / _OTHER_STATE))
        if lost := sorted({"global_step", "loops", "state_dict", "callbacks"} - other_state.keys()):
            raise UsageError(
                f"the checkpoint {path} is damaged: {_OTHER_STATE} lacks the key {lost[0]!r}; resume from another one"
            )
        return other_state

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, its manifest first, so that a partly removed one is not valid."""

        def remove() -> None:
            (Path(filepath) / manifest.NAME).unlink(missing_ok=True)
            if Path(filepath).is_dir():
                shutil.rmtree(filepath)

        ranks.on_first_rank(remove)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the module's tensors that are not part of a role."""
        owner = self._owner
        prefixes = tuple(f"{name}." for name in (*owner.trained_roles, *owner.frozen_roles))
        return {name: value for name, value in owner.state_dict().items() if not name.startswith(prefixes)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the tensors of :meth:`lightning_module_state_dict`.

        Raises:
            ValueError: the names of the tensors differ from those of the module.
        """
        if "averaging_state" in checkpoint:
            raise UsageError(
                "the checkpoint was written with weight averaging, which this strategy cannot resume: start a new run "
                "from the export, which contains the averaged weights"
            )
        stored = checkpoint["state_dict"]
        if different := sorted(self.lightning_module_state_dict().keys() ^ stored.keys()):
            owner = "this run's module"
            if different[0] in stored:
                owner = "the checkpoint"
            raise UsageError(
                f"only {owner} has {different[0]}: resume with the module and configuration that wrote the checkpoint"
            )
        self._owner.load_state_dict(stored, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict, because optimizers are saved with their roles."""
        return {}

    # -----------------------------------------------------------------------------------------------------------

    @property
    def _owner(self) -> Any:
        return self.lightning_module  # type: ignore[attr-defined]

    @property
    def _stored(self) -> tuple[str, ...]:
        return (*self._owner.trained_roles, *self.stored_frozen_roles)

    @property
    def _fitting(self) -> bool:
        return bool(self._owner.trainer.state.fn == TrainerFn.FITTING)

    def _optimizer(self, name: str) -> Optimizer | None:
        if not self._fitting or name in self.stored_frozen_roles:
            return None
        optimizers: list[Optimizer] = self.optimizers  # type: ignore[attr-defined]
        return optimizers[self._owner.trained_roles.index(name)]


def check_finite(role: str, state: RoleState, step: int) -> None:
    """Validate that weights and optimizer state are finite.

    Args:
        role: name of the role.
        state: this rank's part of the role's state.
        step: step of the checkpoint.

    Raises:
        FloatingPointError: a tensor has values that are not finite; the message names the first one.
    """
    for key, tensor in state.tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and not torch.isfinite(local).all():
            count = int((~torch.isfinite(local)).sum())
            raise NonFiniteError(
                f"{count} values of {key.removeprefix('model.')} of the {role} are not finite after step {step}, so no "
                f"checkpoint was written and the previous one was kept: lower the learning rate, or check the rewards"
            )


def _save(path: Path, states: dict[str, RoleState], rest: bytes, options: SaveOptions, step: int) -> None:
    """Write copies of all roles as a new version. All ranks."""
    version = manifest.begin(path, options.above)
    for name, state in states.items():
        write_role(version / name, state)
    _finish(rest, version, options, step)


def _finish(rest: dict[str, Any] | bytes, version: Path, options: SaveOptions, step: int) -> None:
    """Write the state other than the roles, then publish the version. All ranks."""

    def write() -> None:
        with (version / _OTHER_STATE).open("wb") as file:
            if isinstance(rest, bytes):
                file.write(rest)
            else:
                torch.save(rest, file)

    ranks.on_first_rank(write)
    manifest.publish(version, options.keep, step)
    if (published := options.published) is not None:
        ranks.on_first_rank(lambda: published(version))
