"""What a module of roles leaves behind: its part of a checkpoint, and the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_rlhf.compat import know_step
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.models.lora import check_same, described, frozen_names, save_adapter
from lightning_rlhf.strategies.checkpoints import ReshardableCheckpoints
from lightning_rlhf.strategies.roles import Roles, roles_of


class KeptRoles(LightningModule):
    """A module of several models: what of them a checkpoint and an export hold."""

    sources: dict[str, ModelSource]  # of each role, set by subclasses
    logged_names: dict[str, list[str]]
    trained_roles: tuple[str, ...] = ()
    frozen_roles: tuple[str, ...] = ()

    @property
    def roles(self) -> Roles:
        """The roles as the strategy runs them; the only way to call a model."""
        return roles_of(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave frozen roles out, and what LoRA leaves as it was: their source is in the configuration."""
        prefixes, frozen = tuple(f"{name}." for name in self.frozen_roles), frozen_names(self)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            k: v for k, v in state.items() if k not in frozen and not k.startswith(prefixes or ("\0",))
        }
        if adapters := described(self.sources):
            checkpoint["lora"] = adapters
        checkpoint["logged_names"] = {part: list(names) for part, names in self.logged_names.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other adapters, or without all weights of the trained roles.

        What is not strict lets any weight be absent.

        Role strategies keep roles apart and look for themselves.

        Raises:
            ValueError: weights are missing.
        """
        check_same(self.sources, checkpoint.get("lora", {}))
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.logged_names = {part: list(names) for part, names in checkpoint.get("logged_names", {}).items()}
        else:
            know_step(self.trainer, checkpoint["global_step"])
        if isinstance(self.trainer.strategy, ReshardableCheckpoints):
            return
        prefixes = tuple(f"{name}." for name in self.trained_roles)
        there = checkpoint["state_dict"].keys() | frozen_names(self)
        missing = [k for k in self.state_dict() if k.startswith(prefixes) and k not in there]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} weights of {type(self).__name__}, the first is {missing[0]}; "
                f"it was written by another kind of run"
            )

    def export(self, directory: str | Path, write: bool = True, adapter: bool = False) -> None:
        """Write the model that a finished run hands on, in the format that transformers and vLLM load. All ranks.

        Args:
            directory: where to.
            write: whether this rank writes; the others only help to bring the weights together.
            adapter: write LoRA adapters by themselves, as peft does; else they are merged into the weights.

        Raises:
            FloatingPointError: a weight is not finite.
        """
        role, weights = self.trained_roles[0], dict[str, Tensor]()
        for name, tensor in self.roles.iter_adapters(role) if adapter else self.roles.iter_full_params(role):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise FloatingPointError(
                    f"{name} of the {role} holds values that are not finite, so the model is not exported"
                )
            if write:
                weights[name] = tensor.to("cpu", copy=True)
        model = getattr(self, role)
        if write and adapter:
            save_adapter(self.sources[role].lora, weights, Path(directory), model.lm.name_or_path or None)
        elif write:
            model.save_pretrained(directory, weights)

    @torch.no_grad()
    def parameter_counts(self) -> dict[str, int]:
        """Parameters of each role."""
        return {
            name: sum(getattr(p, "ds_numel", p.numel()) for p in getattr(self, name).parameters())
            for name in (*self.trained_roles, *self.frozen_roles)
        }
