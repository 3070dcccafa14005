"""Metrics as sums and weights, so that means are exact over micro-batches and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

_APPROX_KL = "kl/approx"


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
        # values[mask] would make the host wait for a GPU, to learn how many there are.
        counted = values.new_full((), values.numel()) if mask is None else mask.sum().double()
        part = Sums()
        part._sums[name] = torch.stack([(values if mask is None else values.masked_fill(~mask, 0)).sum(), counted])
        self.merge(part)

    def add_approx_kl(self, values: Tensor, mask: Tensor) -> None:
        """Add to KL(old || new) of the policy, which ``target_kl`` bounds; it is logged as ``kl/approx``.

        Args:
            values: (B, T) KL of each token, nats.
            mask: (B, T) bool, the tokens that count.
        """
        self.add(_APPROX_KL, values, mask)

    def approx_kl(self, reduce: Callable[[Tensor], Tensor]) -> float | None:
        """The mean KL over all ranks; None where none was added. All ranks.

        Args:
            reduce: sums a tensor over ranks.
        """
        if _APPROX_KL not in self._sums:
            return None
        total, count = reduce(self._sums[_APPROX_KL]).tolist()
        return total / count if count else float("nan")

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
        return dict(zip(self._sums, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
