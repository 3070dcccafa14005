"""What all modules share: roles under manual optimization, and one exact update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import lightning_rlhf.strategies.registry  # noqa: F401 (names the strategies for the Trainer)
from lightning_rlhf.batching.micro import token_budget_batches
from lightning_rlhf.compat import count_training_step, optimizer_at
from lightning_rlhf.models.loading import ModelSource, Pretrained, as_source
from lightning_rlhf.models.positions import check_positions
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.kept_roles import KeptRoles
from lightning_rlhf.modules.schedules import RunSchedule
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.paths import names_a_path
from lightning_rlhf.strategies.checkpoints import ReshardableCheckpoints
from lightning_rlhf.strategies.extension_builds import await_builds, optimizer_extensions
from lightning_rlhf.strategies.role_state import check_optimizer
from lightning_rlhf.tensor_batch import TensorBatch


class RoleModule(KeptRoles):
    """A module of several models, each with its own optimizer, under manual optimization.

    ``trainer.global_step`` counts calls of ``training_step``, and learning rates are scheduled on the same count.

    Args:
        micro_batch_tokens: most tokens in one forward pass, padding included unless rows are packed, positive.
        max_grad_norm: gradients of each role are clipped to this global norm; None leaves them.
    """

    packing = False  # whether rows share a forward pass without padding
    reads: type | None = None  # the batches that it learns from, where a data module gives them

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
        self.logged_names: dict[str, list[str]] = {}  # of the metrics of each part of a step, in the checkpoint too
        self.built = False

    # -- models -----------------------------------------------------------------------------------------------

    def take_sources(self, **given: str | ModelSource | None) -> None:
        """Remember where the weights of an actor and of other roles come from; those that are not trained are frozen.

        An actor with LoRA whose reference has the same source is that reference without its adapters: no second copy
        is loaded, and "ref" is no role.

        Raises:
            ValueError: a frozen role with LoRA.
        """
        self.sources = {name: as_source(source) for name, source in given.items() if source is not None}
        start, ref = self.sources["actor"], self.sources.get("ref")
        if start.lora is not None and ref in (start, replace(start, lora=None)):
            del self.sources["ref"]
        self.frozen_roles = tuple(name for name in self.sources if name not in self.trained_roles)
        for name in self.frozen_roles:
            if self.sources[name].lora is not None:
                raise ValueError(f"the {name} is not trained, so its source can have no lora: leave it out there")

    def build_role(self, name: str) -> nn.Module:
        """Load or make the model of a role. Subclasses say how."""
        raise NotImplementedError

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """How a trained role is optimized. Subclasses say."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Raise if a model's hub does not answer: before the data module looks there for a tokenizer of that name."""
        for source in self.sources.values():
            if isinstance(source, Pretrained) and not names_a_path(source.path) and "/" in source.path:
                source.expect_reachable()

    def setup(self, stage: str) -> None:
        """Refuse, before any model is loaded, what the run could not do or could not keep.

        That is: scaled gradients, which several optimizers would clip before they are unscaled; models that read other
        token ids than the data has, or shorter texts; optimizers whose state no checkpoint could give to another number
        of processes.
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
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.check_reads(data)
        roles = {f"the {name}": source for name, source in self.sources.items()}
        check_vocabularies(roles, getattr(data, "tokenizer", None))
        check_positions(roles, getattr(data, "longest_text", 0))
        strategy = self.trainer.strategy
        if stage == "fit" and isinstance(strategy, ReshardableCheckpoints):
            for name in self.trained_roles:
                make_optimizer, _ = self.optimizer_of(name)
                await_builds(optimizer_extensions(make_optimizer), self.trainer.local_rank == 0)
                check_optimizer(make_optimizer, strategy.optimizer_device)

    @classmethod
    def check_reads(cls, data: Any) -> None:
        """Raise if the data module makes batches of a type that this module cannot train on.

        Args:
            data: data module; one without an attribute ``gives`` is accepted.

        Raises:
            ValueError: the data module makes batches of another type; the message names the data module to use.
        """
        gives = getattr(data, "gives", cls.reads)
        if cls.reads is not None and gives is not cls.reads:
            fitting = {"SequenceBatch": "Conversation"}.get(
                cls.reads.__name__, cls.reads.__name__.removesuffix("Batch")
            )
            raise ValueError(
                f"{cls.__name__} cannot train on the rows of {type(data).__name__}: "
                f"use {fitting}DataModule as data module"
            )

    def configure_model(self) -> None:
        """Build every role in host memory: trained ones in train mode, frozen ones without gradients.

        Lightning calls this with the GPU as the default device under some strategies. Initial weights would then be
        drawn by the GPU's generator, and transformers would need accelerate to load a model.
        """
        if self.built:
            return
        with torch.device("cpu"):
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
            if not isinstance(optimizer, Optimizer):
                raise ValueError(f"the {name}'s optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
            entry: dict[str, Any] = {"optimizer": optimizer}
            if make_scheduler is not None:
                scheduler = make_scheduler(optimizer)
                if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
                    raise ValueError(f"the {name}'s schedule must be an LRScheduler of torch, got {scheduler!r}")
                if isinstance(scheduler, RunSchedule):
                    scheduler.stretch(self.trainer.estimated_stepping_batches)
                entry["lr_scheduler"] = {"scheduler": scheduler, "interval": "step"}
            configured.append(entry)
        return configured

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
        micro_batches = self.micro_batches(batch)
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

    def micro_batches(self, batch: TensorBatch) -> list[tuple[Tensor, bool]]:
        """The batch's row numbers by token budget, and idle ones (see :meth:`in_step`). All ranks."""
        lengths = batch.real_lengths if self.packing else batch.total_lengths
        return self.in_step(token_budget_batches(lengths, self.micro_batch_tokens, self.packing))

    def by_rows(self, function: Callable[[Any], Sequence[Tensor | None]], batch: TensorBatch) -> list[Any]:
        """Apply a function of a batch to micro-batches of it and put the results back in order; None stays None.

        All ranks.
        """
        micro_batches = self.micro_batches(batch)
        outputs = [function(batch[rows]) for rows, _ in micro_batches]
        parts = [rows for rows, idle in micro_batches if not idle]
        back = torch.argsort(torch.cat(parts))
        columns = zip(*outputs[: len(parts)], strict=True)
        return [None if column[0] is None else torch.cat(column)[back.to(column[0].device)] for column in columns]

    @torch.no_grad()
    def measure(self, batch: TensorBatch, summed_loss: Callable[[Any, Sums], Tensor]) -> Sums:
        """What a loss says of a validation batch, nothing learnt from it. All ranks."""
        sums = Sums()
        for rows, idle in self.micro_batches(batch):
            summed_loss(batch[rows], Sums() if idle else sums)
        return sums

    def in_step(self, micro_batches: list[Tensor]) -> list[tuple[Tensor, bool]]:
        """As many micro-batches on every rank, because every forward of a sharded model takes all ranks.

        Args:
            micro_batches: row numbers of each; at least one.

        Returns:
            The same, and idle ones behind them (True): one row again, whose results nobody counts.
        """
        most = len(micro_batches)
        if self.roles.data_ranks > 1:
            most = int(self.roles.max_over_ranks(torch.tensor(float(most), device=self.device)))
        idle = [(micro_batches[-1][:1], True)] * (most - len(micro_batches))
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
        self.log_step("update", metrics, bar)

    def log_step(self, part: str, metrics: Mapping[str, float], bar: Sequence[str] = ()) -> None:
        """Log metrics of one part of a training step; all that it ever logged and now lacks are logged as NaN.

        Lightning would repeat the last value of a metric that a step does not log, in every logger.

        Args:
            part: of the step, for example ``update``; each is logged once in a step.
            metrics: already reduced over ranks.
            bar: names that the progress bar shows.
        """
        names = self.logged_names.setdefault(part, [])
        names += [name for name in metrics if name not in names]
        for name in names:
            self.log(name, float(metrics.get(name, math.nan)), prog_bar=name in bar, batch_size=1)

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
