"""RoleStrategy: the interface between a module and the strategy that distributes its models over devices.

A strategy wraps each role of a module (actor, critic, ref, reward_model), not the LightningModule. Training step,
callbacks and validation call a role only through :meth:`RoleStrategy.role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlhf.compat import step_optimizer, trainer_of
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.models.adapter_files import is_head
from lightning_rlhf.models.heads import Head, head_of
from lightning_rlhf.models.lora import base_name, is_adapter, merged
from lightning_rlhf.models.tensors import persistent_buffers, quantized_layers
from lightning_rlhf.ranges import check_range
from lightning_rlhf.strategies.activations import ActivationOffload
from lightning_rlhf.strategies.names import OURS

T = TypeVar("T")

FULL_GPU = (
    "lightning-rlhf: the GPU's memory is full. Lower model.init_args.micro_batch_tokens, set activation_checkpointing "
    "of the strategy, or lower gpu_memory_utilization of the engine; lightning-rlhf plan, with the options of this "
    "run, lists what needs the memory and which change suffices"
)


class RoleStrategy:
    """Builds and runs the roles of a module; this base class supports a single process.

    Strategies inherit from it and from a strategy of Lightning, and override methods for several processes.
    "All ranks" in a docstring means that every rank must call the method, in the same order.

    Attributes:
        data_ranks: the data ranks, as seen from this process.
        activation_checkpointing: whether trained roles store only the inputs of layers and recompute other activations.
        activation_offload: whether activations of trained roles are in host memory until the backward pass needs them.
        mlp_tokens: most tokens that a feed-forward layer computes at a time; None is all.
        keeps_whole_weights: whether every process has the whole weights of each role, which may then be quantized.
        keeps_master_weights: whether the strategy has float32 copies of trained weights in bfloat16.
        gradient_scale: factor of the local loss. It is the number of ranks where the strategy averages gradients, so
            that the result is the gradient of the sum over the ranks.
    """

    data_ranks: DataRanks = ONE_RANK
    activation_checkpointing = False
    activation_offload = False
    mlp_tokens: int | None = None
    keeps_whole_weights: bool = True
    keeps_master_weights = False
    gradient_scale = 1.0

    def set_activations(self, activation_offload: bool, mlp_tokens: int | None) -> None:
        """Set the attributes of these names.

        Raises:
            ValueError: ``mlp_tokens`` is not positive.
        """
        check_range("mlp_tokens", mlp_tokens, "positive or null")
        self.activation_offload, self.mlp_tokens = activation_offload, mlp_tokens

    def on_exception(self, exception: BaseException) -> None:
        """Add to an error about the GPU's memory what to change; Lightning calls this for all errors of a run."""
        # The engine's process sends the text of its error.
        if isinstance(exception, torch.OutOfMemoryError) or "out of memory" in str(exception):
            exception.add_note(FULL_GPU)
        super().on_exception(exception)  # type: ignore[misc]

    @property
    def module(self) -> Any:
        """The module, with one attribute per role in ``trained_roles`` and ``frozen_roles``."""
        return self.lightning_module  # type: ignore[attr-defined]

    def build_role(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a role and distribute its weights. All ranks.

        Args:
            name: name of the role.
            build: factory of the model, in its final mode and with its final ``requires_grad``.
        """
        return build()

    def role(self, name: str) -> Callable[..., Any]:
        """Return the callable that runs a role's forward pass; all ranks must call it."""
        model: Callable[..., Any] = getattr(self.module, name)
        return model

    def saved_activations(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for forward passes of a role that save activations; see ``activation_offload``."""
        device = self.module.device
        if self.activation_offload and device.type != "cpu":
            return ActivationOffload(device, getattr(self.module, name).parameters())
        return nullcontext()

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of a micro-batch; ``sync`` is True for the last one."""
        return nullcontext()

    def backward_role(self, name: str, loss: Tensor) -> None:
        """Add the gradients of a loss to those of a trained role. All ranks."""
        self.module.manual_backward(loss)

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """Clip a role's gradient to a global norm, None for no clipping; return the norm before clipping. All ranks."""
        parameters = [p for p in getattr(self.module, name).parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)

    def step_role(self, name: str) -> None:
        """Take one optimizer step of a trained role and clear its gradients. All ranks."""
        step_optimizer(self.module, self.module.trained_roles.index(name))

    def drop_gradients(self, name: str) -> None:
        """Clear a trained role's gradients without a step. All ranks."""
        getattr(self.module, name).zero_grad()

    def end_phase(self) -> None:
        """Finish the updates of a training step, or a validation; generation may follow. All ranks."""

    def iter_full_params(
        self, name: str, dtype: torch.dtype | None = None, receivers: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, full tensor) of weights with adapters merged in, then of persistent buffers.

        Tied tensors are yielded once. A tensor is valid until the next one. All ranks, to the end of the iterator.

        Args:
            name: name of the role.
            dtype: dtype that the caller casts matrices to; sharded matrices may be cast before they are gathered, which
                sends fewer bytes. Adapters are merged before the cast.
            receivers: ranks that read the tensors; on the others, those of FSDP may have no values and be on the meta
                device. None: all ranks.
        """
        lm = getattr(self.module, name).lm
        adapted = any(is_adapter(parameter_name) for parameter_name, _ in lm.named_parameters())
        yield from merged(lm, self.iter_unmerged_params(name, None, None if adapted else dtype, receivers))
        yield from persistent_buffers(lm)

    def iter_unmerged_params(
        self,
        name: str,
        wanted: Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        receivers: Sequence[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the model, full tensor) without merging; adapters have the names of peft. All ranks.

        Args:
            name: name of the role.
            wanted: predicate on names; other tensors are not gathered. None yields all.
            dtype: dtype that sharded matrices may have; None keeps theirs.
            receivers: argument of :meth:`iter_full_params`.
        """
        lm = getattr(self.module, name).lm
        layers = dict(quantized_layers(lm))
        for parameter_name, parameter in lm.named_parameters():
            if wanted is None or wanted(parameter_name):
                layer = layers.get(parameter_name)
                yield parameter_name, parameter.detach() if layer is None else layer.dequantized()

    def iter_adapters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield only the adapters, and a scalar model's head, as in :meth:`iter_unmerged_params`. All ranks."""
        return self.iter_unmerged_params(name, lambda key: is_adapter(key) or is_head(key))

    def iter_base_params(self, name: str, receivers: Sequence[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, full tensor) of the model without its adapters. All ranks.

        Args:
            name: name of the role.
            receivers: argument of :meth:`iter_full_params`.
        """
        whole = self.iter_unmerged_params(name, lambda key: not is_adapter(key), receivers=receivers)
        for parameter_name, parameter in whole:
            yield base_name(parameter_name), parameter
        yield from persistent_buffers(getattr(self.module, name).lm)

    def full_head(self, name: str) -> Head:
        """Return the output head of a language-model role with full weights, without gradients. All ranks.

        A strategy that shards weights gathers a copy, which is valid until the role's weights change.
        """
        lm = getattr(self.module, name).lm
        outputs = lm.get_output_embeddings()
        weight, bias = outputs.weight, getattr(outputs, "bias", None)
        if not isinstance(weight, DTensor) and weight.numel():  # ZeRO stage 3 replaces parameters by empty tensors
            return head_of(lm, (weight.detach(), None if bias is None else bias.detach()))
        parts = ((key, "weight" if p is weight else "bias", p) for key, p in lm.named_parameters())
        names = {key: part for key, part, p in parts if p is weight or p is bias}
        gathered = self.iter_unmerged_params(name, names.__contains__)
        full = {names[key]: tensor.detach().clone() for key, tensor in gathered}  # valid until the next one
        return head_of(lm, (full["weight"], full.get("bias")))

    @property
    def is_group_leader(self) -> bool:
        """Whether this process is the first of the ranks with the same data."""
        return True

    def run_on_group_leader(self, make: Callable[[], T]) -> T:
        """Call a function on the group leader, and return its result on all ranks with the same data, which call this.

        Args:
            make: function that is expensive or not deterministic, with a result that can be pickled.
        """
        return make()


class SingleDeviceRoles(RoleStrategy):
    """Runs the roles under a single-device strategy that is not a :class:`RoleStrategy`, such as Lightning's own.

    Args:
        module: module with the roles.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    @property
    def module(self) -> Any:
        """The module."""
        return self._module


def role_strategy_of(module: LightningModule) -> RoleStrategy:
    """Return the role strategy of a module's Trainer; in a single process, one is created if needed.

    Raises:
        RuntimeError: the run has several processes, but its strategy is not a :class:`RoleStrategy`.
    """
    trainer = trainer_of(module)
    if trainer is not None and isinstance(trainer.strategy, RoleStrategy):
        return trainer.strategy
    if trainer is None or trainer.world_size == 1:
        return SingleDeviceRoles(module)
    name = type(trainer.strategy).__name__
    raise RunError(
        f"{name} wraps the whole module, but actor, critic, reference and reward model are trained and sharded "
        f"separately: use strategy={OURS.get(name, 'rlhf_ddp')!r}"
    )
