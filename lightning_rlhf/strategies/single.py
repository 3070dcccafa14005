"""The role strategy for one process, which does not wrap the roles."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies.checkpoints.reshardable import ReshardableCheckpoints
from lightning_rlhf.strategies.idle import OffloadsIdle


class RLHFSingleDeviceStrategy(ReshardableCheckpoints, OffloadsIdle, SingleDeviceStrategy):
    """:class:`~lightning_rlhf.strategies.roles.RoleStrategy` for one device.

    All role strategies can load its checkpoints.

    Args:
        activation_checkpointing: whether trained roles store only the inputs of layers and recompute the rest.
        offload_idle: whether frozen roles and optimizer states are in host memory while they are not used; see
            :class:`OffloadsIdle`.
        activation_offload: whether activations are in host memory between forward and backward pass; no effect on CPUs.
        mlp_tokens: most tokens that a feed-forward layer computes at a time, positive; its inner activations are
            computed again in the backward pass. None computes all at once.
        **kwargs: arguments of Lightning's ``SingleDeviceStrategy``.
    """

    def __init__(
        self,
        activation_checkpointing: bool = False,
        offload_idle: bool = False,
        activation_offload: bool = False,
        mlp_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.activation_checkpointing = activation_checkpointing
        self.offload_idle = offload_idle
        self.set_activations(activation_offload, mlp_tokens)
        self.parallel_devices: list[torch.device] | None = None  # set by the Trainer
        self.num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        """Device of the Trainer."""
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    def setup_environment(self) -> None:
        """Validate that the run has a single process.

        Raises:
            ValueError: the Trainer has more than one device or node.
        """
        count = len(self.parallel_devices or [0]) * self.num_nodes
        if count > 1:
            raise UsageError(
                f"rlhf_single runs in one process, but the Trainer has {count} devices: use rlhf_ddp, rlhf_fsdp or "
                f"rlhf_deepspeed_stage_3, or devices: 1"
            )
        super().setup_environment()
