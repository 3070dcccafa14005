"""What every strategy over several processes shares: sums, maxima and rows over all shares of the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.strategies.failure import EndsTogether
from lightning_rlhf.strategies.roles import Roles


class DistributedRoles(EndsTogether, Roles):
    """Roles over the processes of torch.distributed, of which one that fails ends all."""

    @property
    def data_group(self) -> Any:
        """The processes that have different shares of the data; None is all of them."""
        return None

    @property
    def data_rank(self) -> int:  # type: ignore[override]
        """See :class:`Roles`."""
        return self.global_rank  # type: ignore[attr-defined]

    @property
    def data_ranks(self) -> int:  # type: ignore[override]
        """See :class:`Roles`."""
        return self.world_size  # type: ignore[attr-defined]

    @property
    def gradient_scale(self) -> float:  # type: ignore[override]
        """Gradients are averaged over the shares, so their sum is that many times more."""
        return float(self.data_ranks)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """See :meth:`Roles.sum_over_ranks`."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def max_over_ranks(self, value: Tensor) -> Tensor:
        """See :meth:`Roles.max_over_ranks`."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        reduced = value.detach().to(self.root_device, copy=True)  # type: ignore[attr-defined]
        dist.all_reduce(reduced, operation, group=self.data_group)
        return reduced.to(value.device)

    def gather_over_ranks(self, value: Tensor) -> Tensor:
        """See :meth:`Roles.gather_over_ranks`."""
        shapes = [torch.zeros(value.ndim, dtype=torch.long, device=self._device) for _ in range(self.data_ranks)]
        dist.all_gather(shapes, torch.tensor(value.shape, device=self._device), group=self.data_group)
        largest = torch.stack(shapes).amax(0).tolist()
        # Neither gloo nor NCCL promises bool.
        plain = value.to(torch.uint8) if value.dtype == torch.bool else value
        padded = torch.zeros(largest, dtype=plain.dtype, device=self._device)
        padded[tuple(slice(size) for size in value.shape)] = plain.to(self._device)
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded, group=self.data_group)
        rows = torch.cat([part[: int(shape[0])] for part, shape in zip(parts, shapes, strict=True)])
        return rows.to(value.device, value.dtype)

    @property
    def _device(self) -> torch.device:
        return self.root_device  # type: ignore[attr-defined]
