"""RoleModule: several models under manual optimization, and one exact update of one of them."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_rlhf.strategies.registry  # noqa: F401 (names the strategies for the Trainer)
from lightning_rlhf.compat import count_training_step, optimizer_at, set_global_step, trainer_of
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import NonFiniteError, UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.functional.products import use_faster_products
from lightning_rlhf.images import FeatureCache, reader
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.models.loading import ModelSource, Pretrained, as_source, with_dtype
from lightning_rlhf.models.lora import adapter_settings, check_adapters, frozen_names
from lightning_rlhf.models.master_weights import needs_master_weights, use_master_weights
from lightning_rlhf.models.positions import check_positions
from lightning_rlhf.models.shared_bases import sharing
from lightning_rlhf.models.tensors import count_parameters
from lightning_rlhf.models.vocabulary import check_vocabularies
from lightning_rlhf.modules.metrics import MeanAccumulator, UpdateResult
from lightning_rlhf.modules.micro_batches import MicroBatches, SummedLoss
from lightning_rlhf.modules.optimizers import mark_parameters_of_adamw, use_fused_kernels
from lightning_rlhf.modules.schedules import make_schedule, without_lengths
from lightning_rlhf.modules.text_layout import TextLayout
from lightning_rlhf.modules.trainer_settings import check_trainer
from lightning_rlhf.paths import names_a_path
from lightning_rlhf.ranges import check_range
from lightning_rlhf.run_checks import check_quantization
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from lightning_rlhf.strategies.checkpoints.role_state import check_optimizer
from lightning_rlhf.strategies.extension_builds import await_builds, optimizer_extensions
from lightning_rlhf.strategies.roles import RoleStrategy, role_strategy_of
from lightning_rlhf.types import TensorBatch

log = logging.getLogger(__name__)


class RoleModule(LightningModule):
    """Base class of all these modules: several models (roles), each with its own optimizer.

    You rarely name it in YAML, but its arguments work in all its subclasses. Lightning's automatic optimization is off.
    ``trainer.global_step`` counts calls of ``training_step``, and learning rates follow the same count.

    Args:
        micro_batch_tokens: most tokens in one forward pass, positive. Padding counts, too, unless rows are packed.
            Lower it if the GPU runs out of memory. None chooses by the memory of the device: 2,048 on a CPU, 4,096 on a
            GPU of 24 GiB, 16,384 from 70 GiB on.
        max_grad_norm: each role's gradient is clipped to this global norm. None does not clip.
        packing: whether the texts of a forward pass form one row without padding. Texts do not attend to each other,
            and gradients are the same up to rounding. Architectures that do not allow it are padded.
    """

    reads: type | None = None  # type of the batches, where the data module declares its own
    sources: dict[str, ModelSource]  # of each role that has its own weights
    trained_roles: tuple[str, ...] = ()  # in the order of their optimizers
    frozen_roles: tuple[str, ...] = ()
    allows_dropout = False  # whether adapters may have dropout: no loss compares two forward passes of a role
    has_pairs = False  # whether a row of a batch is a pair of texts, which are evaluated together
    uses_frozen_in_updates = False  # whether losses run frozen roles, so that they are needed in each update

    def __init__(
        self, micro_batch_tokens: int | None = None, max_grad_norm: float | None = 1.0, packing: bool = True
    ) -> None:
        super().__init__()
        check_range("micro_batch_tokens", micro_batch_tokens, "positive or null")
        check_range("max_grad_norm", max_grad_norm, "positive or null")
        self.automatic_optimization = False
        self.strict_loading = False  # frozen roles are not in the checkpoint
        self.layout = TextLayout(self, micro_batch_tokens, packing)
        self.max_grad_norm = max_grad_norm
        self.logged_names: dict[str, list[str]] = {}  # metrics of each part of a step so far, also in the checkpoint
        self.built = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RoleModule:
        """Copy the module for averages of its weights; factories of optimizers are shared.

        Factories of a configuration refer to the parsed command line, and through it to the whole run.
        """
        state = self.__getstate__()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(
            {name: value if isinstance(value, partial) else copy.deepcopy(value, memo) for name, value in state.items()}
        )
        return made

    @property
    def role_strategy(self) -> RoleStrategy:
        """The strategy that runs the roles. Models are called only through it."""
        return role_strategy_of(self)

    @property
    def data_ranks(self) -> DataRanks:
        """The ranks that hold different data."""
        return self.role_strategy.data_ranks

    # -- models -----------------------------------------------------------------------------------------------

    def set_sources(self, **sources: str | ModelSource | None) -> None:
        """Set where the weights of each role come from. Roles that are not in ``trained_roles`` are frozen.

        If the actor uses LoRA and a frozen language model, such as the reference, comes from the same source, you get
        the actor without its adapters instead. No second copy is loaded, and this model is not a role. If the actor
        starts from an adapter, a frozen language model with the same source keeps that adapter, and one without
        ``adapter`` is the actor without it.

        Args:
            **sources: directory, hub id or model source of each role. None means that the role does not exist.

        Raises:
            ValueError: a frozen role specifies LoRA without an adapter.
        """
        self.sources = {name: as_source(source) for name, source in sources.items() if source is not None}
        actor = self.sources["actor"]
        if actor.lora is not None:
            same = [_without_adapters(actor)]
            if _starts_at_base(actor):
                same.append(actor)
            language_models = [name for name in self.sources if name not in (*self.trained_roles, "reward_model")]
            for name in [name for name in language_models if self.sources[name] in same]:
                del self.sources[name]
        self.frozen_roles = tuple(name for name in self.sources if name not in self.trained_roles)
        for name in self.frozen_roles:
            source = self.sources[name]
            if source.lora is not None and _starts_at_base(source):
                raise UsageError(f"the {name} is not trained, so its source cannot have lora: remove it there")

    def build_role(self, name: str) -> nn.Module:
        """Build the model of a role."""
        raise NotImplementedError

    def optimizer_of(self, name: str) -> tuple[OptimizerCallable, LRSchedulerCallable | None]:
        """Return the optimizer and scheduler factories of a trained role."""
        raise NotImplementedError

    def configure_callbacks(self) -> list[Callback]:
        """Raise for settings that need automatic optimization, before Lightning does. Adds no callbacks."""
        names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "callbacks")
        check_trainer({name: getattr(self.trainer, name) for name in names})
        return []

    def prepare_data(self) -> None:
        """Raise if a model's hub cannot be reached, before the data module looks for a tokenizer there."""
        for source in self.sources.values():
            if isinstance(source, Pretrained) and not names_a_path(source.path) and "/" in source.path:
                source.expect_reachable()

    def setup(self, stage: str) -> None:
        """Validate precision, data, vocabularies, positions and optimizers before any model is loaded."""
        precision = self.trainer.precision
        if precision == "16-mixed":
            raise UsageError(
                "precision 16-mixed scales gradients, which several optimizers do not share: use bf16-mixed"
            )
        if precision not in ("32-true", "bf16-mixed"):
            raise UsageError(
                f"precision must be 32-true or bf16-mixed, got {precision}: bf16-mixed computes in bfloat16, with "
                f"float32 weights of trained models, and bfloat16 weights of the others"
            )
        for name in self.trained_roles:
            lora = self.sources[name].lora
            if lora is not None and lora.dropout and not self.allows_dropout:
                raise UsageError(
                    f"lora: dropout is {lora.dropout} for the {name}, but {type(self).__name__} compares probabilities "
                    f"of two forward passes, which must come from the same network: set dropout to 0"
                )
        self._check_quantization()
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.check_reads(data)
        if self.trainer.is_global_zero:
            for line in self.unused(data):
                log.warning(line)
        self._check_images()
        roles = {f"the {name}": source for name, source in self.sources.items()}
        check_vocabularies(roles, getattr(data, "tokenizer", None))
        check_positions(roles, getattr(data, "longest_text_tokens", 0), has_pairs=self.has_pairs)
        strategy = self.trainer.strategy
        if stage == "fit" and isinstance(strategy, ReshardableCheckpoints):
            for name in self.trained_roles:
                make_optimizer, _ = self.optimizer_of(name)
                await_builds(optimizer_extensions(make_optimizer), self.trainer.local_rank == 0)
                check_optimizer(
                    make_optimizer,
                    strategy.optimizer_device,
                    strategy.keeps_matrices,
                    self.role_strategy.keeps_whole_weights,
                )

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Tokens that stand for images in the data. No response contains them. Empty if your data contain no images."""
        data = getattr(trainer_of(self), "datamodule", None)
        return () if getattr(data, "image_store", None) is None else (self._image_token,)

    @cached_property
    def _image_token(self) -> int:
        source = self.sources.get("actor") or next(iter(self.sources.values()))
        return int(source.hf_config().image_token_id)

    def _prepare_for_images(self) -> None:
        """Set the tokens that no response contains, and keep the features of frozen image encoders."""
        caches: dict[Pretrained, FeatureCache] = {}
        for name in (*self.trained_roles, *self.frozen_roles):
            role: Any = getattr(self, name)
            if isinstance(role, CausalLM):
                role.never_sampled = self.image_tokens
            # With sharded weights, all ranks must encode images together.
            trains_images = name in self.trained_roles and self.sources[name].train_vision
            if self.role_strategy.keeps_whole_weights and not trains_images:
                role.image_features = reader().FeatureCache()
                source = self.sources[name]
                if isinstance(source, Pretrained):  # random weights of other classes are drawn in another order
                    base = replace(source.base, train_vision=False)
                    role.image_features = caches.setdefault(base, role.image_features)

    def _check_images(self) -> None:
        """Raise if the data have images and a model reads none."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if getattr(data, "image_store", None) is None:
            return
        for name, source in self.sources.items():
            reader().check_reads_images(name, source.hf_config())

    def _check_quantization(self) -> None:
        """Raise if quantized weights would be trained, or sharded."""
        for name, source in self.sources.items():
            quantization = source.quantization if isinstance(source, Pretrained) else None
            if quantization is None:
                continue
            if name in self.trained_roles:
                check_quantization(name, quantization, has_adapters=source.lora is not None)
            if not self.role_strategy.keeps_whole_weights:
                raise UsageError(
                    f"{type(self.trainer.strategy).__name__} shards weights, but it cannot shard weights in "
                    f"{quantization}, as the {name}'s are: use rlhf_ddp, rlhf_single or rlhf_deepspeed_stage_2"
                )

    @classmethod
    def check_reads(cls, data: Any) -> None:
        """Raise if the data module makes batches of a type that this module cannot train on.

        Args:
            data: data module to check. One without an attribute ``batch_type`` is accepted.

        Raises:
            ValueError: the batches are of another type. The message names the data module to use.
        """
        batch_type = getattr(data, "batch_type", cls.reads)
        if cls.reads is not None and batch_type is not cls.reads:
            fitting = {"SequenceBatch": "Conversation"}.get(
                cls.reads.__name__, cls.reads.__name__.removesuffix("Batch")
            )
            raise UsageError(
                f"{cls.__name__} cannot train on the rows of {type(data).__name__}: "
                f"use {fitting}DataModule as data module"
            )

    @classmethod
    def unused(cls, data: Any) -> list[str]:
        """Return a line for each column in the data that this module does not use.

        Args:
            data: data module that has read its rows.
        """
        return []

    def configure_model(self) -> None:
        """Build every role in host memory: trained ones in train mode, frozen ones without gradients.

        Under some strategies Lightning calls this with the GPU as the default device. The GPU's generator would then
        draw the initial weights, and transformers would need accelerate to load a model.
        """
        if self.built:
            return
        trainer = trainer_of(self)
        mixed = trainer is not None and trainer.precision == "bf16-mixed"
        self.sources = {n: with_dtype(source, n in self.trained_roles, mixed) for n, source in self.sources.items()}
        bases: dict[Any, Any] = {}  # of this call, so that weights without a role are freed
        with torch.device("cpu"):
            for build, names in ((self._build_trained, self.trained_roles), (self._build_frozen, self.frozen_roles)):
                for name in names:
                    with sharing(bases if self.shared_base_of(name) is not None else None):
                        setattr(self, name, self.role_strategy.build_role(name, partial(build, name)))
        if self.image_tokens:
            self._prepare_for_images()
        self.built = True

    def shared_base_of(self, name: str) -> str | None:
        """Return the first role with the same frozen weights as a role, maybe itself, or None if no other uses them.

        Roles share weights if these are frozen and come from the same source.

        Args:
            name: name of a role.
        """
        frozen = [role for role, source in self.sources.items() if role in self.frozen_roles or source.lora is not None]
        bases = {role: source.base for role in frozen if isinstance(source := self.sources[role], Pretrained)}
        same = [
            role
            for role in (*self.trained_roles, *self.frozen_roles)
            if role in bases and bases[role] == bases.get(name)
        ]
        return same[0] if len(same) > 1 else None

    def _build_trained(self, name: str) -> nn.Module:
        role: Any = self._tiled(self.build_role(name)).train()
        if needs_master_weights(self.sources[name]) and not self.role_strategy.keeps_master_weights:
            use_master_weights(role)
        if self.role_strategy.activation_checkpointing:
            role.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return role

    def _build_frozen(self, name: str) -> nn.Module:
        return self._tiled(self.build_role(name)).requires_grad_(False).eval()

    def _tiled(self, role: Any) -> Any:
        tokens = self.role_strategy.mlp_tokens
        if tokens is not None:
            the_offered("tiled_mlp").tile_mlps(role.lm, tokens)
        return role

    def configure_optimizers(self) -> Any:
        """Make the optimizer, and the scheduler if any, of each trained role, in that order."""
        configured = []
        for name in self.trained_roles:
            make_optimizer, make_scheduler = self.optimizer_of(name)
            mark_parameters_of_adamw(getattr(self, name))
            optimizer = make_optimizer([p for p in getattr(self, name).parameters() if p.requires_grad])
            if not isinstance(optimizer, Optimizer):
                raise UsageError(f"the {name}'s optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
            use_fused_kernels(optimizer)
            entry: dict[str, Any] = {"optimizer": optimizer}
            if make_scheduler is not None:
                scheduler = make_schedule(make_scheduler, optimizer, self._count_steps, name)
                entry["lr_scheduler"] = {"scheduler": scheduler, "interval": "step"}
            configured.append(entry)
        return configured

    def _count_steps(self) -> float:
        return self.trainer.estimated_stepping_batches

    def on_fit_start(self) -> None:
        """Choose how to multiply linear layers, and packed or padded rows, once the models are in their final form."""
        if self.device.type == "cpu":
            use_faster_products(self)
        self.layout.check()

    def on_validation_start(self) -> None:
        """Make the same choices if you validate without training."""
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            RoleModule.on_fit_start(self)

    def on_validation_end(self) -> None:
        """End the phase in which frozen roles compute."""
        self.role_strategy.end_phase()

    def train(self, mode: bool = True) -> RoleModule:
        """Set the mode of the trained roles. Frozen ones stay in evaluation mode."""
        super().train(mode)
        for name in self.frozen_roles:
            if self.built:
                getattr(self, name).eval()
        return self

    @torch.no_grad()
    def parameter_counts(self, trained: bool = False) -> dict[str, int]:
        """Count the parameters of each role, all shards together.

        Args:
            trained: whether to count only parameters with a gradient, for example adapters.
        """
        roles = (*self.trained_roles, *self.frozen_roles)
        return {name: count_parameters(getattr(self, name), trained) for name in roles}

    # -- one update -------------------------------------------------------------------------------------------

    def update(self, role: str, batch: TensorBatch, summed_loss: SummedLoss, denominator: Tensor) -> UpdateResult:
        """Take one optimizer step of one role on one mini-batch, exact for any micro-batches and ranks. All ranks.

        The loss is a sum over the mini-batch divided by a count over the mini-batch *and all ranks*. Its gradient
        therefore does not depend on how you split the rows. If the loss rejects all tokens and no gradient is left, no
        step is made.

        Args:
            role: name of a trained role.
            batch: rows of this rank, at least one, with ``total_lengths``.
            summed_loss: summed loss of some rows, with gradient. It also adds their metrics.
            denominator: () divisor of the sum, counted over the mini-batch and all ranks, positive.

        Raises:
            FloatingPointError: the gradient's norm is not finite. This role's weights stay as they were.
        """
        return self.micro_batches.update(role, batch, summed_loss, denominator, self.max_grad_norm)

    @property
    def micro_batches(self) -> MicroBatches:
        """Forward passes and updates of a batch in micro-batches."""
        return MicroBatches(self.layout, self.role_strategy, self.device)

    # -- metrics ----------------------------------------------------------------------------------------------

    def finish_step(self, metrics: dict[str, float], bar: tuple[str, ...]) -> None:
        """Step the schedulers, count this training step once and log its metrics.

        Args:
            metrics: metrics of the step, reduced over ranks.
            bar: names of the metrics in the progress bar.
        """
        for i, name in enumerate(self.trained_roles):  # the rate of this step, not of the next
            metrics[f"lr/{name}"] = optimizer_at(self, i).param_groups[0]["lr"]
        schedulers: Any = self.lr_schedulers() or []
        with warnings.catch_warnings():
            # A step without any update is scheduled too.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()
        self.role_strategy.end_phase()
        count_training_step(self.trainer)
        self.log_step("update", metrics, bar)

    def log_step(self, part: str, metrics: Mapping[str, float], bar: Sequence[str] = ()) -> None:
        """Log the metrics of one part of a training step, with NaN for earlier metrics that are missing now.

        Without the NaN, Lightning would repeat the last value of a metric in every logger.

        Args:
            part: name of the part, for example ``update``. Log each part once in a step.
            metrics: metrics of the part, reduced over ranks.
            bar: names of the metrics in the progress bar.
        """
        names = self.logged_names.setdefault(part, [])
        names += [name for name in metrics if name not in names]
        for name in names:
            self.log(name, float(metrics.get(name, math.nan)), prog_bar=name in bar, batch_size=1)

    def log_validation(self, means: MeanAccumulator, weight: Tensor, bar: str) -> None:
        """Log the means of one validation batch.

        Args:
            means: metrics of this rank's rows.
            weight: () number of tokens or pairs of this rank, the weight of the batch in the mean over all batches.
            bar: name of the metric in the progress bar.
        """
        total = int(self.data_ranks.sum(weight))
        for name, value in means.means(self.data_ranks).items():
            self.log(name, value, prog_bar=name == bar, batch_size=total)

    # -- checkpoint and export --------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove frozen weights, which are loaded from their sources, and add LoRA settings and metric names."""
        frozen = frozen_names(self)
        prefixes = tuple(f"{name}." for name in self.frozen_roles)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if k not in frozen and not k.startswith(prefixes)}
        if adapters := adapter_settings(self.sources):
            checkpoint["lora"] = adapters
        checkpoint["logged_names"] = {part: list(names) for part, names in self.logged_names.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Validate a checkpoint, because ``strict_loading`` is off and missing weights would go unnoticed.

        Role strategies store roles separately and validate them there.

        Raises:
            ValueError: the checkpoint contains other adapters, or lacks weights of a trained role.
        """
        check_adapters(self.sources, checkpoint.get("lora", {}))
        if self.trainer.state.fn == TrainerFn.FITTING:
            states = checkpoint.get("lr_schedulers", [])
            checkpoint["lr_schedulers"] = [without_lengths(state) for state in states]
            self.logged_names = {part: list(names) for part, names in checkpoint.get("logged_names", {}).items()}
        else:
            set_global_step(self.trainer, checkpoint["global_step"])
        if isinstance(self.trainer.strategy, ReshardableCheckpoints):
            return
        prefixes = tuple(f"{name}." for name in self.trained_roles)
        present = checkpoint["state_dict"].keys() | frozen_names(self)
        missing = [k for k in self.state_dict() if k.startswith(prefixes) and k not in present]
        if missing:
            raise UsageError(
                f"the checkpoint lacks {len(missing)} weights of {type(self).__name__}, the first is {missing[0]}; "
                f"it was written by another kind of run"
            )

    def export(self, directory: str | Path, write: bool = True, adapter: bool = False) -> None:
        """Write the first trained role in the format that transformers and vLLM load. All ranks.

        Args:
            directory: output directory.
            write: whether this rank writes. The others only take part in gathering the weights.
            adapter: whether to write LoRA adapters alone, in peft's format. Otherwise they are merged into the weights.

        Raises:
            FloatingPointError: a weight is not finite.
        """
        role, weights = self.trained_roles[0], dict[str, Tensor]()
        strategy, model = self.role_strategy, getattr(self, self.trained_roles[0])
        for name, tensor in strategy.iter_adapters(role) if adapter else strategy.iter_full_params(role):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise NonFiniteError(f"{name} of the {role} has values that are not finite: nothing was exported")
            if write:
                weights[name] = tensor.to("cpu", copy=True)
        if write and adapter:
            base = model.lm.name_or_path or None
            save_adapter(self.sources[role].lora, weights, Path(directory), base, model.adapter_metadata)
        elif write:
            error = getattr(text_model_of(model.lm), "quantization_error", None)
            if error is not None:
                log.warning(
                    "The export has the quantized weights of the %s, whose relative difference to those of its source "
                    "is %.3f; export the adapter alone to add it to the source's weights", role, error
                )  # fmt: skip
            model.save_pretrained(directory, weights)


def _without_adapters(source: ModelSource) -> ModelSource:
    """Return the source of a model without its adapters."""
    return source.base if isinstance(source, Pretrained) else replace(source, lora=None)


def _starts_at_base(source: ModelSource) -> bool:
    """Return whether adapters of a source, if any, are new, so that the model initially equals its base."""
    return not isinstance(source, Pretrained) or source.adapter is None
