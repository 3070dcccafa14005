"""FSDP2: every process has a shard of each role and trains on its part of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from lightning_rlhf.compat import set_group_timeout
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.models.lora import base_name
from lightning_rlhf.models.sequence_parallel import SequenceRanks
from lightning_rlhf.ranges import check_at_least, check_range
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from lightning_rlhf.strategies.distributed import DistributedRoles, ProcessRanks
from lightning_rlhf.strategies.first_rank import from_first_rank, loaded_by_first_rank, shapes_of
from lightning_rlhf.strategies.gather import start_gathering
from lightning_rlhf.strategies.sequence_parallel import check_sequence_parallel
from lightning_rlhf.strategies.tensor_parallel import split, tensor_parallel_plan

T = TypeVar("T")
log = logging.getLogger(__name__)


class RLHFFSDPStrategy(ReshardableCheckpoints, DistributedRoles, ModelParallelStrategy):
    """One ``fully_shard`` root per role; weights, gradients and optimizer states are sharded layer by layer.

    With ``precision: bf16-mixed``, layers compute in bfloat16; weights and gradient reductions are float32.

    Args:
        tensor_parallel_size: number of processes that split each layer and have the same rows; a divisor of the number
            of processes and of the heads of every model.
        sequence_parallel_size: number of processes that divide the tokens of each row, for long texts. Its product with
            ``tensor_parallel_size`` divides the number of processes and the heads of every model; keys are repeated
            where they have fewer heads. Weights are sharded over these processes too. In attention they exchange tokens
            for heads (Ulysses). Rotary positions of the types ``dynamic`` and ``longrope`` are rejected before the
            first step, because they depend on the length of a text.
        shard_size: number of data ranks over which weights are sharded; further data ranks hold replicas, and their
            gradients are summed. Larger values need less memory, smaller ones less traffic between nodes. None is one
            node's data ranks in a run on several nodes, else all. A checkpoint is read under any other value.
        activation_checkpointing: attribute of :class:`RoleStrategy`.
        activation_offload: attribute of :class:`RoleStrategy`.
        mlp_tokens: attribute of :class:`RoleStrategy`.
        cpu_offload: whether shards, gradients and optimizer states are in host memory, where optimizers also step.
        reshard_after_forward: whether a trained role's gathered weights are freed between forward and backward; None
            frees those of layers, but not of embedding and head. Those of a frozen role are always freed.
        reduce_every_micro_batch: whether gradients are reduced with every micro-batch, so that a process never stores
            full gradients; False reduces once per update, with less traffic.
        process_group_backend: backend of the process group; None uses NCCL for GPUs and gloo for CPUs.
        timeout: longest time of a collective.
    """

    keeps_whole_weights = False

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        shard_size: int | None = None,
        activation_checkpointing: bool = False,
        activation_offload: bool = False,
        mlp_tokens: int | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool | None = None,
        reduce_every_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        check_at_least(1, tensor_parallel_size=tensor_parallel_size, sequence_parallel_size=sequence_parallel_size)
        check_range("shard_size", shard_size, "at least 1 or null")
        super().__init__(
            tensor_parallel_size=tensor_parallel_size, process_group_backend=process_group_backend, timeout=timeout
        )
        self.tensor_parallel_size = tensor_parallel_size
        self.sequence_parallel_size = sequence_parallel_size
        self.shard_size = shard_size
        self.activation_checkpointing = activation_checkpointing
        self.set_activations(activation_offload, mlp_tokens)
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.reduce_every_micro_batch = reduce_every_micro_batch

    # -- processes --------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Create a mesh of replicas, shards, sequence- and tensor-parallel processes, the last with neighbouring ranks.

        Its dimensions, with the ranks in the groups of rank 0 for 16 processes with ``shard_size: 2``,
        ``sequence_parallel_size: 2`` and ``tensor_parallel_size: 2``::

            replicate          have the same part of the weights                    0, 8
            shard              have other rows and other parts of the weights       0, 4
            sequence_parallel  have parts of the same rows, and of the weights      0, 2
            tensor_parallel    have the same rows, and split each layer             0, 1
          joined from these:
            data_parallel      replicate x shard: all with other rows               0, 4, 8, 12
            all_shards         shard x sequence_parallel: a layer is gathered here  0, 2, 4, 6
            same_rows          sequence_parallel x tensor_parallel                  0, 1, 2, 3

        Without sequence parallelism there is no ``all_shards`` and no ``same_rows``; without replicas as well, the mesh
        is Lightning's, with ``data_parallel`` and ``tensor_parallel`` alone.

        Raises:
            UsageError: a size does not divide the number of processes.
        """
        processes = self.num_nodes * self.num_processes
        same_rows = self.tensor_parallel_size * self.sequence_parallel_size
        if processes % same_rows:
            sizes = f"tensor_parallel_size: {self.tensor_parallel_size}"
            if self.sequence_parallel_size > 1:
                sizes += f" times sequence_parallel_size: {self.sequence_parallel_size}"
            raise UsageError(f"{sizes} does not divide the {processes} processes of this run; use a divisor")
        data_ranks = processes // same_rows
        shard_data_ranks = self._shard_data_ranks(data_ranks, same_rows)
        self._ranks_per_replica = shard_data_ranks * same_rows  # consecutive ranks that have all weights together
        # Lightning's mesh knows no sequence parallelism, and its two sizes must multiply to all processes: in its mesh,
        # sequence-parallel processes count as data ranks.
        self._data_parallel_size = processes // self.tensor_parallel_size
        super().setup_environment()
        has_replicas = shard_data_ranks < data_ranks
        if self.sequence_parallel_size > 1 or has_replicas:
            self._replace_mesh(data_ranks // shard_data_ranks, shard_data_ranks)
        if same_rows > 1 or has_replicas:  # else all groups are that of the run
            self._set_timeouts()

    def _shard_data_ranks(self, data_ranks: int, same_rows: int) -> int:
        """Return over how many data ranks weights are sharded: ``shard_size``, those of a node or all."""
        of_a_node = max(self.num_processes // same_rows, 1)
        count = self.shard_size or (data_ranks if self.num_nodes == 1 else of_a_node)
        if data_ranks % count:
            name = f"shard_size: {count}" if self.shard_size else f"the number of data ranks of a node, {count},"
            raise UsageError(
                f"{name} does not divide the {data_ranks} data ranks of this run; set shard_size to a divisor"
            )
        return count

    def _set_timeouts(self) -> None:
        """Give the groups of the mesh the timeout of the run's group."""
        if self._timeout is None:
            return
        # get_all_groups() has no dimension that _flatten() made.
        joined = ["data_parallel", *(["same_rows", "all_shards"] if self.sequence_parallel_size > 1 else [])]
        groups = [self.device_mesh[dimension].get_group() for dimension in joined]
        for group in (*self.device_mesh.get_all_groups(), *groups):
            set_group_timeout(group, self._timeout)

    def _replace_mesh(self, replicas: int, shard_data_ranks: int) -> None:
        """Replace Lightning's mesh by one with all dimensions of :meth:`setup_environment`."""
        names = ("replicate", "shard", "sequence_parallel", "tensor_parallel")
        sizes = (replicas, shard_data_ranks, self.sequence_parallel_size, self.tensor_parallel_size)
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)
        mesh["replicate", "shard"]._flatten("data_parallel")
        if self.sequence_parallel_size > 1:
            mesh["shard", "sequence_parallel"]._flatten("all_shards")
            mesh["sequence_parallel", "tensor_parallel"]._flatten("same_rows")
        assert self.lightning_module is not None
        self._device_mesh = self.lightning_module._device_mesh = mesh
        if replicas > 1:
            log.info(
                "Weights are sharded over %d processes, with %d replicas (shard_size of rlhf_fsdp).",
                shard_data_ranks * self.sequence_parallel_size, replicas,
            )  # fmt: skip

    @property
    def _shard_mesh(self) -> DeviceMesh:
        """The processes over which weights are sharded: one dimension of shards, or two of replicas and shards."""
        if "replicate" not in (self.device_mesh.mesh_dim_names or ()):  # Lightning's mesh, without replicas
            return self.device_mesh["data_parallel"]
        dimension = "all_shards" if self.sequence_parallel_size > 1 else "shard"
        if self.device_mesh["replicate"].size() > 1:
            return self.device_mesh["replicate", dimension]
        return self.device_mesh[dimension]

    @property
    def _same_rows_mesh(self) -> DeviceMesh:
        """The processes with the same rows."""
        return self.device_mesh["same_rows" if self.sequence_parallel_size > 1 else "tensor_parallel"]

    @property
    @override
    def data_ranks(self) -> DataRanks:  # type: ignore[override]
        """The data ranks, as seen from this process; processes that split layers or rows have the same data rank."""
        mesh = self.device_mesh["data_parallel"]
        return ProcessRanks(mesh.get_local_rank(), mesh.size(), self.root_device, mesh.get_group())

    @property
    @override
    def is_group_leader(self) -> bool:
        return self._same_rows_mesh.get_local_rank() == 0

    @override
    def run_on_group_leader(self, make: Callable[[], T]) -> T:
        if self._same_rows_mesh.size() == 1:
            return make()
        group = self._same_rows_mesh.get_group()
        result = [make() if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(result, group=group, group_src=0)
        return result[0]  # type: ignore[return-value]

    # -- models -----------------------------------------------------------------------------------------------

    @override
    def build_role(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a role on rank 0 and shard it layer by layer; see :meth:`RoleStrategy.build_role`.

        Rank 0 needs host memory for the whole model, other ranks only for their shards and one layer.

        Raises:
            ValueError: tensor parallelism does not support this model, or its tensors differ between ranks.
        """
        bare = shapes_of(build)
        # Both raise before weights are loaded.
        tensor_parallel_plan(name, bare.lm, self.tensor_parallel_size)
        check_sequence_parallel(name, bare.lm, self.sequence_parallel_size, self.tensor_parallel_size)
        role = loaded_by_first_rank(name, bare, build)
        if self.sequence_parallel_size > 1:
            mesh = self.device_mesh["sequence_parallel"]
            role.sequence_ranks = SequenceRanks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        reshard = self.reshard_after_forward if name in self.module.trained_roles else True
        self._shard(name, role, reshard, self._base_shards(name))
        return role

    def _base_shards(self, name: str) -> Mapping[str, DTensor]:
        """Return the frozen shards of the earlier role whose base model a role shares; none if it shares none."""
        first = self.module.shared_base_of(name)  # built before this one
        return {} if first in (None, name) else _frozen_shards(getattr(self.module, first))

    def _shard(self, name: str, role: Any, reshard: bool | None, shared: Mapping[str, DTensor]) -> None:
        """Shard each repeated block as one FSDP unit, and the remaining modules as the root unit.

        A frozen role must reshard after forward, because there is no backward pass to free its gathered weights.
        """
        options: dict[str, Any] = {
            "mesh": self._shard_mesh,
            "reshard_after_forward": reshard,
            "mp_policy": self._precision_policy(role),
            "offload_policy": self._offload_policy,
            "shard_placement_fn": partial(shard_placement, ranks=self._shard_mesh.size(-1)),
        }
        plan = tensor_parallel_plan(name, role.lm, self.tensor_parallel_size)
        blocks = list(_repeated_blocks(role))
        in_blocks = {module for block in blocks for module in block.modules()}
        for block in blocks:
            modules = list(block.modules())
            self._receive(modules)
            split(modules, plan, self.device_mesh["tensor_parallel"])
            fully_shard(block, **options)
            _share_shards(block, role, shared)  # at once: memory has the frozen shards of one block twice at most
        rest = [module for module in role.modules() if module not in in_blocks]
        self._receive(rest)
        split(rest, plan, self.device_mesh["tensor_parallel"])
        fully_shard(role, **options)
        _share_shards(role, role, shared)

    def _receive(self, modules: Iterable[nn.Module]) -> None:
        """Replace the tensors of modules by rank 0's, on this rank's device; tied tensors stay tied."""
        received: dict[Tensor, nn.Parameter] = {}
        for module in modules:
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in received:
                    whole = from_first_rank(parameter, self.root_device)
                    received[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                setattr(module, key, received[parameter])
            for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                setattr(module, key, from_first_rank(buffer, self.root_device))

    def _precision_policy(self, role: Any) -> MixedPrecisionPolicy:
        mixed = self.precision_plugin.precision == "bf16-mixed" or getattr(role, "computes_in_bfloat16", False)
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32)

    @property
    def _offload_policy(self) -> OffloadPolicy:
        if not self.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu")

    @override
    def model_to_device(self) -> None:
        """Move the tensors outside of the roles to the device; the roles are where ``cpu_offload`` wants them."""
        for name in (*self.module.trained_roles, *self.module.frozen_roles):
            self._reshard(name)  # otherwise optimizers would be constructed with gathered weights of an earlier run
        children = dict(self.module._modules)
        for name in (*self.module.trained_roles, *self.module.frozen_roles):
            delattr(self.module, name)
        super().model_to_device()
        self.module._modules.clear()
        self.module._modules.update(children)  # in their order

    # -- one update -------------------------------------------------------------------------------------------

    @override
    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Reduce gradients with every micro-batch, or only with the last; see ``reduce_every_micro_batch``.

        Between replicas they are summed with the last only: shards of sums are kept until then, in float32.
        """
        role = getattr(self.module, name)
        role.set_requires_gradient_sync(sync or self.reduce_every_micro_batch)  # within a replica
        role.set_requires_all_reduce(sync)  # between replicas
        return nullcontext()

    @override
    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        """Compute the norm mesh by mesh, and sum it over the dimensions in which a mesh shards.

        Torch's function does not support gradients on different meshes.
        """
        # A gradient is a DTensor, because fully_shard() makes every parameter one, or None.
        gradients = [p.grad for p in getattr(self.module, name).parameters() if isinstance(p.grad, DTensor)]
        square = torch.zeros((), device=self.root_device)
        for mesh, placements in dict.fromkeys((g.device_mesh, g.placements) for g in gradients):
            local = [g.to_local() for g in gradients if (g.device_mesh, g.placements) == (mesh, placements)]
            part = torch.nn.utils.get_total_norm(local).to(self.root_device, torch.float32).square()
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(part, group=mesh.get_group(dimension))
            square += part
        norm = square.sqrt()
        if max_norm is not None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.to_local().mul_(factor.to(gradient.to_local().device))
        return norm

    # -- weights for the engine -------------------------------------------------------------------------------

    @override
    def iter_unmerged_params(
        self,
        name: str,
        wanted: Callable[[str], bool] | None = None,
        dtype: torch.dtype | None = None,
        receivers: Sequence[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """A tensor is gathered while the one before it is used."""
        self._reshard(name)
        replicas = {rank // self._ranks_per_replica for rank in receivers or ()}
        if receivers is not None and len(replicas) < len(receivers):
            receivers = None  # of two in one replica, the second would wait for the first: all gather instead
        before: tuple[str, Tensor] | None = None
        for parameter_name, parameter in super().iter_unmerged_params(name, wanted):
            # Vectors, such as norms, stay as they are: they are small, and an engine may have them in float32.
            narrows = dtype is not None and parameter.ndim > 1 and dtype.itemsize < parameter.element_size()
            shard = parameter.to(self.root_device, dtype if narrows else None)
            assert isinstance(shard, DTensor)
            finish = start_gathering(shard, receivers)
            if before is not None:
                yield before
            before = parameter_name, finish()
        if before is not None:
            yield before

    def _reshard(self, name: str) -> None:
        """Free weights that stayed gathered after a forward pass without a backward pass."""
        for unit in getattr(self.module, name).modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _frozen_shards(role: nn.Module) -> dict[str, DTensor]:
    """Return the frozen parameters of a sharded role by their names without adapters."""
    named = ((base_name(name), parameter) for name, parameter in role.named_parameters())
    return {name: p for name, p in named if isinstance(p, DTensor) and not p.requires_grad}


def _share_shards(unit: nn.Module, role: nn.Module, shared: Mapping[str, DTensor]) -> None:
    """Make the frozen parameters of a role use the shards of another role, whose values are equal.

    Args:
        unit: part of the role that was sharded last.
        role: role with these parameters, of which those of earlier units share already.
        shared: shards of the other role by their names; empty for a role that shares none.
    """
    if not shared:
        return
    for name, shard in _frozen_shards(role).items():
        other = shared.get(name)
        if other is not None and (other.placements, other.shape) == (shard.placements, shard.shape):
            shard._local_tensor = other._local_tensor
    unit._apply(lambda tensor: tensor)  # FSDP's _apply reads the local tensors again, and frees the unit's own shards


def shard_placement(parameter: Tensor, ranks: int) -> Shard | None:
    """Return the dimension along which FSDP shards a parameter; None is its default, the first.

    Applies to experts in one tensor: with fewer experts than ranks, sharding the first dimension would leave most ranks
    with padding only.

    Args:
        parameter: full parameter, or one already split by tensor parallelism.
        ranks: number of ranks over which it is sharded.
    """
    if isinstance(parameter, DTensor) or parameter.ndim < 3 or parameter.shape[0] >= ranks:
        return None
    return next((Shard(d) for d, size in enumerate(parameter.shape) if size % ranks == 0), None)


def _repeated_blocks(role: nn.Module) -> Iterator[nn.Module]:
    """Yield the members with weights of the outermost module lists.

    A list inside a block, such as experts, is not sharded by member: ranks may run different experts, and their
    collectives would deadlock.
    """
    for child in role.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _repeated_blocks(child)
