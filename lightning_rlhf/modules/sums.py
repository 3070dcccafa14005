"""Metrics as sums and weights, so that means are exact over micro-batches and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor


class Sums:
    """Named running means that keep numerator and denominator apart until the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to a mean.

        Args:
            name: of the metric.
            values: any shape.
            mask: bool of the same shape, which values count; None counts all.
        """
        values = values.detach().double()
        if mask is not None:
            values = values[mask]
        part = Sums()
        part._sums[name] = torch.stack([values.sum(), values.new_tensor(float(values.numel()))])
        self.merge(part)

    def merge(self, other: "Sums") -> None:
        """Add all of another's means to these."""
        for name, part in other._sums.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means over all ranks, in one reduction; the mean of nothing is NaN.

        Args:
            reduce: sums a tensor over ranks.
        """
        if not self._sums:
            return {}
        totals = reduce(torch.stack(list(self._sums.values())))
        # NaN rather than left out: the logger would repeat its last value.
        return {name: (s / n).item() for name, (s, n) in zip(self._sums, totals, strict=True)}
