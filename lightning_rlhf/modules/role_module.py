"""What all modules share: roles under manual optimization, and one exact update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

import lightning_rlhf.strategies.registry  # noqa: F401 (names the strategies for the Trainer)
from lightning_rlhf.batching.micro import token_budget_batches
from lightning_rlhf.compat import count_training_step, optimizer_at
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.models.lora import check_same, described, frozen_names, save_adapter
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.strategies.checkpoints import ReshardableCheckpoints
from lightning_rlhf.strategies.role_state import check_optimizer
from lightning_rlhf.strategies.roles import Roles, roles_of
from lightning_rlhf.tensor_batch import TensorBatch


class RoleModule(LightningModule):
    """A module of several models, each with its own optimizer, under manual optimization.

    ``trainer.global_step`` counts calls of ``training_step``, and learning rates are scheduled on the same count.

    Args:
        micro_batch_tokens: most padded tokens in one forward pass, positive.
        max_grad_norm: gradients of each role are clipped to this global norm; None leaves them.
    """

    sources: dict[str, ModelSource]  # of each role, set by subclasses
    trained_roles: tuple[str, ...] = ()
    frozen_roles: tuple[str, ...] = ()

    def __init__(self, micro_batch_tokens: int, max_grad_norm: float | None) -> None:
        super().__init__()
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be positive, got {micro_batch_tokens}")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive or null, got {max_grad_norm}")
        self.automatic_optimization = False
        self.strict_loading = False  # frozen roles are not in the checkpoint
        self.micro_batch_tokens = micro_batch_tokens
        self.max_grad_norm = max_grad_norm
        self.built = False

    # -- models -----------------------------------------------------------------------------------------------

    def build_role(self, name: str) -> nn.Module:
        """Load or make the model of a role. Subclasses say how."""
        raise NotImplementedError

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """How a trained role is optimized. Subclasses say."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Refuse, before any model is loaded, what the run could not do or could not keep.

        That is: scaled gradients, which several optimizers would clip before they are unscaled; models that read other
        token ids than the data has; optimizers whose state no checkpoint could give to another number of processes.
        """
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "precision 16-mixed scales gradients, which several optimizers do not share: use bf16-mixed"
            )
        if self.trainer.precision not in ("32-true", "bf16-mixed"):
            raise ValueError(
                f"precision must be 32-true or bf16-mixed, got {self.trainer.precision}; to keep whole models in "
                f"bfloat16, give their sources dtype: bfloat16"
            )
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        check_vocabularies({f"the {name}": source for name, source in self.sources.items()}, tokenizer)
        strategy = self.trainer.strategy
        if stage == "fit" and isinstance(strategy, ReshardableCheckpoints):
            for name in self.trained_roles:
                check_optimizer(self.optimizer_of(name)[0], strategy.optimizer_device)

    def configure_model(self) -> None:
        """Build every role: trained ones in train mode, frozen ones without gradients."""
        if self.built:
            return
        for name in self.trained_roles:
            setattr(self, name, self.roles.build_role(name, partial(self._build_trained, name)))
        for name in self.frozen_roles:
            setattr(self, name, self.roles.build_role(name, partial(self._build_frozen, name)))
        self.built = True

    def _build_trained(self, name: str) -> nn.Module:
        role: Any = self.build_role(name).train()
        if self.roles.activation_checkpointing:
            role.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return role

    def _build_frozen(self, name: str) -> nn.Module:
        return self.build_role(name).requires_grad_(False).eval()

    def configure_optimizers(self) -> Any:
        """One optimizer, and scheduler if any, per trained role, in that order."""
        configured = []
        for name in self.trained_roles:
            make_optimizer, make_scheduler = self.optimizer_of(name)
            optimizer = make_optimizer([p for p in getattr(self, name).parameters() if p.requires_grad])
            entry: dict[str, Any] = {"optimizer": optimizer}
            if make_scheduler is not None:
                entry["lr_scheduler"] = {"scheduler": make_scheduler(optimizer), "interval": "step"}
            configured.append(entry)
        return configured

    @property
    def roles(self) -> Roles:
        """The roles as the strategy runs them; the only way to call a model."""
        return roles_of(self)

    def train(self, mode: bool = True) -> RoleModule:
        """Train or evaluation mode of the trained roles; frozen ones stay in evaluation mode."""
        super().train(mode)
        for name in self.frozen_roles:
            if self.built:
                getattr(self, name).eval()
        return self

    # -- one update -------------------------------------------------------------------------------------------

    def update(
        self,
        role: str,
        batch: TensorBatch,
        summed_loss: Callable[[Any, Sums], Tensor],
        denominator: Tensor,
        sums: Sums,
    ) -> Tensor:
        """One optimizer step of one role on one mini-batch, exact whatever the micro-batches and ranks.

        The loss is a sum over the mini-batch divided by a count over the mini-batch *and all ranks*, so its gradient
        does not depend on how the rows are cut up. All ranks.

        Args:
            role: a trained role.
            batch: the rows of this rank, at least one, with ``total_lengths``.
            summed_loss: gives the loss of some rows, a sum, with gradient, and adds metrics of them.
            denominator: what the sum is divided by, counted over the mini-batch and all ranks, positive.
            sums: what metrics are added to.

        Returns:
            The gradient's norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; this role's weights are as before.
        """
        scale = self.roles.gradient_scale / float(denominator)
        micro_batches = self.in_step(token_budget_batches(batch.total_lengths, self.micro_batch_tokens))
        for i, (rows, idle) in enumerate(micro_batches):
            with self.roles.accumulate(role, sync=i == len(micro_batches) - 1):
                loss = summed_loss(batch[rows], Sums() if idle else sums)
                self.roles.backward_role(role, loss * (0.0 if idle else scale))
        norm = self.roles.clip_role(role, self.max_grad_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the {role}'s gradient norm is {float(norm)} at step {self.trainer.global_step}; its weights were not "
                f"touched. Lower the learning rate, or look at this step's rewards and log-probabilities"
            )
        self.roles.step_role(role)
        return norm

    def in_step(self, micro_batches: list[Tensor]) -> list[tuple[Tensor, bool]]:
        """As many micro-batches on every rank, because every forward of a sharded model takes all ranks.

        Args:
            micro_batches: row numbers of each; at least one.

        Returns:
            The same, and idle ones behind them (True): one row again, whose results nobody counts.
        """
        most = self.roles.max_over_ranks(torch.tensor(float(len(micro_batches)), device=self.device))
        idle = [(micro_batches[-1][:1], True)] * (int(most) - len(micro_batches))
        return [*((rows, False) for rows in micro_batches), *idle]

    def finish_step(self, metrics: dict[str, float], bar: tuple[str, ...]) -> None:
        """Step the schedulers, count this training step once, log.

        Args:
            metrics: already reduced over ranks.
            bar: names that the progress bar shows.
        """
        for i, name in enumerate(self.trained_roles):  # the rate of this step, not of the next
            metrics[f"lr/{name}"] = optimizer_at(self, i).param_groups[0]["lr"]
        schedulers: Any = self.lr_schedulers() or []
        with warnings.catch_warnings():
            # A step may have had nothing to learn; the schedule counts it all the same.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()
        count_training_step(self.trainer)
        for name, value in metrics.items():
            self.log(name, float(value), prog_bar=name in bar, batch_size=1)

    def log_validation(self, sums: Sums, weight: Tensor, bar: str) -> None:
        """Log the means of one validation batch.

        Args:
            sums: of this rank.
            weight: how many tokens or pairs of this rank the means are over; the means over all batches weigh by it.
            bar: name that the progress bar shows.
        """
        total = int(self.roles.sum_over_ranks(weight))
        for name, value in self.reduced(sums).items():
            self.log(name, value, prog_bar=name == bar, batch_size=total)

    def reduced(self, sums: Sums) -> dict[str, float]:
        """Means over all ranks."""
        return sums.means(self.roles.sum_over_ranks)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave frozen roles out, and what LoRA leaves as it was: their source is in the configuration."""
        prefixes, frozen = tuple(f"{name}." for name in self.frozen_roles), frozen_names(self)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            k: v for k, v in state.items() if k not in frozen and not k.startswith(prefixes or ("\0",))
        }
        if adapters := described(self.sources):
            checkpoint["lora"] = adapters

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other adapters, or without all weights of the trained roles.

        What is not strict lets any weight be absent.

        Role strategies keep roles apart and look for themselves.

        Raises:
            ValueError: weights are missing.
        """
        check_same(self.sources, checkpoint.get("lora", {}))
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
        """
        role, weights = self.trained_roles[0], dict[str, Tensor]()
        for name, tensor in self.roles.iter_adapters(role) if adapter else self.roles.iter_full_params(role):
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
