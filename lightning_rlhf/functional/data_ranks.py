"""Reductions and gathers of tensors over data ranks, which have different data."""

from __future__ import annotations

from torch import Tensor


class DataRanks:
    """Interface of the data ranks, implemented for a single rank; subclasses support several processes.

    Tensor-parallel ranks have the same data and count as one data rank. Every process, tensor-parallel ones included,
    must call the methods, in the same order.

    Attributes:
        rank: position of this rank, in [0, size).
        size: number of ranks.
    """

    rank: int = 0
    size: int = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        return value

    def max(self, value: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over the ranks."""
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the ranks.

        Args:
            value: (n,) or (n, w); n and w may differ between ranks, narrow rows are padded with zeros.
        """
        return value


ONE_RANK = DataRanks()
