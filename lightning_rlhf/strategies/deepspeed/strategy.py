"""DeepSpeed: one engine per role; ZeRO shards optimizer state, gradients and weights."""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_rlhf import launch_environment
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError
from lightning_rlhf.models.loading import torch_dtype
from lightning_rlhf.models.tensors import layers
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from lightning_rlhf.strategies.checkpoints.role_files import RoleState
from lightning_rlhf.strategies.deepspeed.config import configuration, of_role, with_bucket
from lightning_rlhf.strategies.deepspeed.precision import RolePrecision
from lightning_rlhf.strategies.deepspeed.private import (
    drop_gradients,
    gradient_norm,
    set_clipping,
    share_partitions,
    spread,
    unlink_shared_memory,
)
from lightning_rlhf.strategies.distributed import DistributedRoles
from lightning_rlhf.strategies.extension_builds import await_builds
from lightning_rlhf.strategies.first_rank import from_first_rank, loaded_by_first_rank, shapes_of


class RLHFDeepSpeedStrategy(ReshardableCheckpoints, DistributedRoles, DeepSpeedStrategy):
    """DeepSpeed with one engine per role; the stage selects the tensors of a trained role that are sharded.

    Frozen roles are sharded under stage 3 only; under stages 1 and 2 every process has a full copy.

    With ``precision: bf16-mixed``, or a source with ``dtype: bfloat16``, weights are bfloat16 and the optimizer has a
    float32 copy of them. Rollout engines and exports get the bfloat16 values, with which the policy computes; exports
    convert them to the dtype of the source.

    Under stage 3 rank 0 loads each role and needs host memory for all of it; the other ranks need memory only for their
    shards and one full parameter.

    Args:
        stage: ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also weights.
        offload_optimizer: whether the optimizer's state is in host memory, where the optimizer also steps.
            ``torch.optim`` is slow on CPUs; ``deepspeed.ops.adam.DeepSpeedCPUAdam`` is faster. DeepSpeed compiles it at
            its first use: this takes minutes (measured: six on two busy cores) and needs a compiler, and on a machine
            with a GPU a CUDA toolkit of torch's version (not tested).
        offload_params: whether all roles' weights are in host memory until they are needed; stage 3 only.
        offload_frozen: whether frozen roles' weights are in host memory; None uses ``offload_params``.
        activation_checkpointing: attribute of :class:`RoleStrategy`.
        activation_offload: attribute of :class:`RoleStrategy`.
        mlp_tokens: attribute of :class:`RoleStrategy`; not under stage 3.
        config: DeepSpeed configuration that overrides the defaults, for example
            ``{zero_optimization: {stage3_param_persistence_threshold: 0}}``.
        timeout: longest time of a collective.
        cluster_environment: environment of the launcher; None lets the Trainer detect it.
        process_group_backend: ``nccl`` or ``gloo``; None uses the default of the device.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        ValueError: an argument contradicts another one.
    """

    keeps_matrices = False
    keeps_master_weights = True

    def __init__(
        self,
        stage: int = 3,
        offload_optimizer: bool = False,
        offload_params: bool = False,
        offload_frozen: bool | None = None,
        activation_checkpointing: bool = False,
        activation_offload: bool = False,
        mlp_tokens: int | None = None,
        config: dict[str, Any] | None = None,
        timeout: timedelta | None = default_pg_timeout,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise MissingPackageError(
                "rlhf_deepspeed_stage_* needs DeepSpeed, which is missing: pip install 'lightning-rlhf[deepspeed]'"
            )
        self.activation_checkpointing = activation_checkpointing
        if stage == 3 and mlp_tokens is not None:
            raise UsageError(
                "mlp_tokens: stage 3 gathers weights for each piece of a row, and ranks have different numbers of "
                "pieces: remove it, or use rlhf_fsdp or stage 2"
            )
        self.set_activations(activation_offload, mlp_tokens)
        self._offload_frozen = offload_params if offload_frozen is None else offload_frozen
        shared = configuration(stage, offload_optimizer, offload_params, self._offload_frozen, config or {})
        launch_environment.apply()  # deepspeed reads the environment when it is imported
        super().__init__(
            config=shared,
            timeout=timeout,
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
        )
        self._engines: dict[str, Any] = {}

    @property
    @override
    def keeps_whole_weights(self) -> bool:  # type: ignore[override]
        """See :class:`RoleStrategy`: under stages 1 and 2."""
        return not self.zero_stage_3

    # -- processes --------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Initialize the process group and start the failure watch.

        Raises:
            RuntimeError: DeepSpeed was imported for another kind of device.
        """
        from deepspeed.accelerator import get_accelerator

        device, chosen = self.root_device.type, get_accelerator().device_name()
        if device != chosen:
            raise RunError(
                f"the Trainer runs on {device}, but DeepSpeed was imported for {chosen}: "
                f"set DS_ACCELERATOR={device} before Python starts"
            )
        if device == "cuda":
            super().setup_environment()
            return
        launch_environment.apply(self.num_processes)
        await_builds(["deepspeed_shm_comm"], self.local_rank == 0)
        with self.joining():
            super(DeepSpeedStrategy, self).setup_environment()  # Lightning's own method raises without CUDA
        self.watch_ranks()

    def setup_distributed(self) -> None:
        """Open the process group; it is closed when Python exits, because a Trainer may fit and then validate."""
        if self.root_device.type == "cuda":
            super().setup_distributed()
        else:  # as in Lightning's method, but without a device index, which a CPU does not have
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
            torch.distributed.barrier()
            unlink_shared_memory(self.global_rank)
        atexit.unregister(_close_process_group)
        atexit.register(_close_process_group)

    # -- building ---------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin as a :class:`RolePrecision`."""
        if self._precision_plugin is None:
            return RolePrecision("32-true")
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin
        if isinstance(plugin, DeepSpeedPrecision):
            self._precision_plugin = RolePrecision(plugin.precision)  # type: ignore[arg-type]

    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return an empty context: :meth:`build_role` shards each role."""
        return nullcontext()

    def build_role(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a role; under stage 3, rank 0 loads it and scatters its parameters one at a time. All ranks.

        Loading with transformers' own ZeRO-3 support would round rotary frequencies to bfloat16.

        Raises:
            ValueError: the role's adapters have DoRA under stage 3.
        """
        if not self.zero_stage_3:
            return self._cast_weights(name, build())
        lora = self.module.sources[name].lora
        if lora is not None and lora.dora:
            raise UsageError(
                f"lora: dora reads whole weights outside of their layers, but stage 3 has freed them: train the {name} "
                f"with rlhf_fsdp or rlhf_deepspeed_stage_2, or without dora"
            )
        role = self._cast_weights(name, loaded_by_first_rank(name, shapes_of(build), build))
        for module in role.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, from_first_rank(buffer, self.root_device))
        spread(role, self.role_config(name), self.root_device)
        first = self.module.shared_base_of(name)
        if first not in (None, name):
            share_partitions(role, getattr(self.module, first))
        return role

    def role_config(self, name: str) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a role's engine."""
        assert self.config is not None
        frozen = name in self.module.frozen_roles
        return of_role(self.config, frozen, self._offload_frozen, bfloat16=self._in_bfloat16(name))

    def _in_bfloat16(self, name: str) -> bool:
        return self.precision_plugin.precision == "bf16-mixed" or self.module.sources[name].dtype == "bfloat16"

    def _cast_weights(self, name: str, model: nn.Module) -> nn.Module:
        """Cast weights to the role's dtype, but not buffers, so that rotary frequencies stay exact."""
        if self._in_bfloat16(name):
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model

    # -- engines ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Construct the engines; they have an optimizer only when fitting."""
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            # Call only once: replaced wrappers of DeepSpeedCPUAdam would free its native state, which is shared.
            super(DeepSpeedStrategy, self).setup_optimizers(trainer)
        optimizers = {}
        if fitting:
            optimizers = dict(zip(self.module.trained_roles, self.optimizers, strict=True))
        for name in (*self.module.trained_roles, *self.module.frozen_roles):
            role = getattr(self.module, name)
            config = self.role_config(name)
            trained = {}
            if name in optimizers:
                parameters = [parameter for parameter in role.parameters() if parameter.requires_grad]
                trained = {"optimizer": optimizers[name], "model_parameters": parameters}
                config = with_bucket(config, parameters)
            elif not self.zero_stage_3:
                role.to(self.root_device)
                continue
            self._engines[name], *_ = deepspeed.initialize(
                model=role, config=config, dist_init_required=False, **trained
            )
        self.barrier()

    @override
    def role(self, name: str) -> Callable[..., Any]:
        return self._engines.get(name) or super().role(name)

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Reduce gradients with the last micro-batch only; stages 2 and 3 shard them and reduce every time."""
        self._engines[name].set_gradient_accumulation_boundary(sync)
        return nullcontext()

    @override
    def backward_role(self, name: str, loss: Tensor) -> None:
        self.module.manual_backward(loss, engine=self._engines[name])

    @override
    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """DeepSpeed clips in its step."""
        set_clipping(self._engines[name], max_norm)
        return gradient_norm(self._engines[name])

    @override
    def step_role(self, name: str) -> None:
        optimizer = self.optimizers[self.module.trained_roles.index(name)]
        self.optimizer_step(optimizer, lambda: None, model=self.module, engine=self._engines[name])

    @override
    def drop_gradients(self, name: str) -> None:
        drop_gradients(self._engines[name])

    @override
    def iter_unmerged_params(
        self,
        name: str,
        wanted: Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        receivers: Sequence[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """All ranks receive values in the dtype of the role's source."""
        dtype = torch_dtype(self.module.sources[name])
        if self.keeps_whole_weights:
            for parameter_name, parameter in super().iter_unmerged_params(name, wanted):
                yield parameter_name, parameter.to(dtype)
            return
        for layer in layers(getattr(self.module, name).lm, wanted):
            with self._gathered([parameter for _, parameter in layer]):
                for parameter_name, parameter in layer:
                    yield parameter_name, parameter.detach().to(dtype)

    def _gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters)
        return gathered

    @override
    def role_state(self, name: str) -> RoleState:
        from lightning_rlhf.strategies.deepspeed.state import zero_state

        return zero_state(getattr(self.module, name), self._zero_optimizer(name))

    @override
    def load_role_state(self, name: str, folder: Path) -> None:
        from lightning_rlhf.strategies.deepspeed.state import zero_load

        zero_load(getattr(self.module, name), self._zero_optimizer(name), folder)

    @property
    @override
    def optimizer_device(self) -> torch.device:
        offloaded = "offload_optimizer" in self.config["zero_optimization"]  # type: ignore[index]
        return torch.device("cpu") if offloaded else self.root_device

    def _zero_optimizer(self, name: str) -> Any:
        if self._fitting:
            return self._engines[name].optimizer
        return None

    def teardown(self) -> None:
        """Remove the engines' hooks and buffers from the roles."""
        for engine in self._engines.values():
            engine.destroy()
        self._engines.clear()
        super().teardown()


def _close_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
