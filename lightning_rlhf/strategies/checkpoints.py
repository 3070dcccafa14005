"""One kind of checkpoint for all role strategies: written by any, on any number of ranks, and read by any other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlhf.strategies import manifest, ranks
from lightning_rlhf.strategies.checkpoint_io import load_plain
from lightning_rlhf.strategies.role_files import RoleState, write_role
from lightning_rlhf.strategies.role_state import native_load, native_state

_REST = "state.pt"


class ReshardableCheckpoints:
    """Checkpoints of a strategy as folders: the trained roles, each in its own, and all that is no role beside them.

    ::

        last.ckpt/manifest.json                     see :mod:`lightning_rlhf.strategies.manifest`
        last.ckpt/v000007/actor/*.safetensors       weights and optimizer, each rank its part
        last.ckpt/v000007/actor/optimizer.json      the optimizer's class and settings
        last.ckpt/v000007/state.pt                  loops, schedulers, callbacks, what the module has beside its roles

    Frozen roles are not written: their source is in the configuration. To be put in front of one of Lightning's
    strategies, whose module has ``trained_roles``, ``frozen_roles`` and one attribute per role.
    """

    restore_checkpoint_after_setup = True  # when models are spread and optimizers made
    lightning_restore_optimizer = False

    # -- what another way of spreading a role overrides -------------------------------------------------------

    @property
    def optimizer_device(self) -> torch.device:
        """Where optimizers step."""
        return self.root_device  # type: ignore[attr-defined]

    def role_state(self, name: str) -> RoleState:
        """What to write of a trained role. All ranks."""
        return native_state(getattr(self._owner, name), self._optimizer(name))

    def load_role_state(self, name: str, folder: Path) -> None:
        """Put back what was written of a trained role: in a fit its optimizer too, else only weights. All ranks."""
        native_load(getattr(self._owner, name), self._optimizer(name), folder)

    # -- what the Trainer calls, on all ranks ----------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a new version of the checkpoint; whatever happens meanwhile, the one before stays whole.

        Raises:
            OSError: it could not be written, on whichever rank.
            ValueError: a file is in the way, or an optimizer's state cannot be given to other ranks.
        """
        version = manifest.begin(Path(filepath))
        for name in self._owner.trained_roles:
            state = ranks.together(lambda name=name: self.role_state(name))  # type: ignore[misc]
            write_role(version / name, state)
            del state
        rest = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        ranks.on_first_rank(lambda: _write_rest(rest, version / _REST))
        manifest.publish(version)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Put a checkpoint's roles back; what is in no role is returned.

        Args:
            checkpoint_path: its folder.
            weights_only: of no account; nothing but tensors and plain values is ever loaded.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is incomplete, damaged, or of another kind of run.
        """
        version = manifest.verified(Path(checkpoint_path))
        stored = {folder.name for folder in version.iterdir() if folder.is_dir()}
        trained = self._owner.trained_roles
        missing, odd = [name for name in trained if name not in stored], sorted(stored - set(trained))
        if missing or (odd and self._fitting):
            raise ValueError(
                f"the checkpoint {checkpoint_path} holds {', '.join(sorted(stored))}, and this run trains "
                f"{', '.join(trained)}: it was written by another kind of run"
            )
        # Not ranks.together: a rank that fails here alone leaves the others in collectives of their own, and ends them.
        for name in trained:
            self.load_role_state(name, version / name)
        return ranks.together(lambda: load_plain(version / _REST))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; one that is half removed counts for nothing."""

        def remove() -> None:
            (Path(filepath) / manifest.NAME).unlink(missing_ok=True)
            if Path(filepath).is_dir():
                shutil.rmtree(filepath)

        ranks.on_first_rank(remove)

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """What the module has beside its roles."""
        owner = self._owner
        prefixes = tuple(f"{name}." for name in (*owner.trained_roles, *owner.frozen_roles))
        return {name: value for name, value in owner.state_dict().items() if not name.startswith(prefixes)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Put that back.

        Raises:
            ValueError: it is not what this module has.
        """
        ours, theirs = self.lightning_module_state_dict(), checkpoint["state_dict"]
        if odd := sorted(ours.keys() ^ theirs.keys()):
            where = "the checkpoint" if odd[0] in theirs else "this run's module"
            raise ValueError(f"only {where} has {odd[0]}: the checkpoint was written by another kind of run")
        self._owner.load_state_dict(theirs, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: optimizers are written with their roles."""
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


def _write_rest(rest: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(rest, file)
