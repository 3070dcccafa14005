"""DDP: every process has a full copy of all roles and trains on its part of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from lightning_rlhf.strategies.distributed import DistributedRoles
from lightning_rlhf.strategies.idle import OffloadsIdle


class RLHFDDPStrategy(ReshardableCheckpoints, OffloadsIdle, DistributedRoles, DDPStrategy):
    """One ``DistributedDataParallel`` per trained role; module attributes and ``state_dict`` names do not change.

    Args:
        activation_checkpointing: attribute of :class:`RoleStrategy`.
        offload_idle: whether frozen roles and optimizer states are in host memory while they are not used; see
            :class:`OffloadsIdle`.
        activation_offload: attribute of :class:`RoleStrategy`.
        mlp_tokens: attribute of :class:`RoleStrategy`.
        timeout: longest time of a collective.
        **kwargs: arguments of Lightning's ``DDPStrategy`` and of ``DistributedDataParallel``.
    """

    replicates_roles = True

    def __init__(
        self,
        activation_checkpointing: bool = False,
        offload_idle: bool = False,
        activation_offload: bool = False,
        mlp_tokens: int | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        # Buffers are constant, so they are not broadcast. torch 2.13 renamed broadcast_buffers.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "broadcast_buffers"
        if "forward_sync_buffers" in known:
            buffers = "forward_sync_buffers"
        super().__init__(timeout=timeout, **({buffers: False, "gradient_as_bucket_view": True} | kwargs))
        self.activation_checkpointing = activation_checkpointing
        self.offload_idle = offload_idle
        self.set_activations(activation_offload, mlp_tokens)
        self._engines: dict[str, DistributedDataParallel] = {}

    def configure_ddp(self) -> None:
        """Wrap the trained roles; frozen ones have no gradients to exchange."""
        for name in self.module.trained_roles:
            self._engines[name] = self._setup_model(getattr(self.module, name))

    @override
    def role(self, name: str) -> Callable[..., Any]:
        return self._engines.get(name) or super().role(name)

    def accumulate(self, name: str, sync: bool) -> AbstractContextManager[None]:
        """Exchange gradients only with the last micro-batch."""
        super().accumulate(name, sync)
        return nullcontext() if sync else self._engines[name].no_sync()

    def teardown(self) -> None:
        """Drop the wrappers."""
        self._engines.clear()
        super().teardown()
