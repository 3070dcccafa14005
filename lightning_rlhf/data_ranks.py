"""The ranks that have different data: their number, and exchange of tensors between them."""

from __future__ import annotations

from torch import Tensor


class DataRanks:
    """A single rank; strategies over several processes override everything.

    Ranks that split tensors between them (tensor parallelism) have the same data and count as one. Every method is
    called on all ranks, in the same order.

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
