"""Sequence parallelism: processes with the same rows compute different tokens of them.

A packed row is divided into parts of equal length. In each attention layer, processes exchange tokens for heads, so
that each computes some heads over the whole row, and then heads for tokens again. See "DeepSpeed Ulysses", Jacobs et
al. 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_rlhf.batching.packing import Packing, pack_texts


@dataclass(frozen=True, eq=False)
class SequenceRanks:
    """The processes that have the same rows, as seen from this process.

    Args:
        rank: position of this process, in [0, size).
        size: number of processes.
        group: their process group.
    """

    rank: int
    size: int
    group: Any

    def part_length(self, tokens: int) -> int:
        """Return the number of tokens of each part of a row, of which the last ones may be padding."""
        return -(-tokens // self.size)

    def part(self, row: Tensor) -> Tensor:
        """Return this process's part of a (1, N) row, padded with zeros."""
        length = self.part_length(row.shape[1])
        padded = functional.pad(row, (0, length * self.size - row.shape[1]))
        return padded[:, self.rank * length : (self.rank + 1) * length]

    def is_local(self, index: Tensor, length: int) -> Tensor:
        """Return whether tokens of a row lie in this process's part.

        Args:
            index: int64 indices of the tokens.
            length: number of tokens of each part.
        """
        return index // length == self.rank

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes.

        Its gradient is multiplied by ``size``: all processes compute the same loss from the sum, and the reduction of
        the weights' gradients averages over them, where their parts must be summed.
        """
        summed: Tensor = _Sum.apply(values, self)
        return summed

    def to_heads(self, states: Tensor, tokens: int) -> Tensor:
        """Exchange tokens for heads.

        Args:
            states: (1, H, n, D) all heads of this process's part; if ``size`` does not divide H, heads are repeated.
            tokens: N, number of tokens of the row without padding.

        Returns:
            (1, H', N, D) some heads of the whole row.
        """
        parts = states.squeeze(0).unflatten(0, (self.size, -1)).contiguous()
        whole = self._exchange(parts).transpose(0, 1).flatten(1, 2)
        return whole[:, :tokens].unsqueeze(0)

    def to_tokens(self, outputs: Tensor) -> Tensor:
        """Exchange heads for tokens; the inverse of :meth:`to_heads` in another layout.

        Args:
            outputs: (1, N, H', E) some heads of the whole row.

        Returns:
            (1, n, H, E) all heads of this process's part.
        """
        rows = outputs.squeeze(0)
        length = self.part_length(len(rows))
        padded = functional.pad(rows, (0, 0, 0, 0, 0, length * self.size - len(rows)))
        heads = self._exchange(padded.unflatten(0, (self.size, length)).contiguous())
        return heads.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of a tensor to process i; return the parts that were received, in the order of the processes."""
        received: Tensor = _Exchange.apply(parts, self.group)
        return received


class _Sum(torch.autograd.Function):
    """Sum over the processes; see :meth:`SequenceRanks.sum`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.size = ranks.size
        summed = values.contiguous().clone()
        dist.all_reduce(summed, group=ranks.group)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None


class _Exchange(torch.autograd.Function):
    """Exchange of the parts of a tensor, whose backward pass is the same exchange; see ``dist.all_to_all_single``."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None


def repeated_keys(keys: Tensor, ranks: int) -> Tensor:
    """Repeat the heads of keys or values as often as needed for the processes to divide them.

    Args:
        keys: (1, K, n, D).
        ranks: number of processes, a divisor of the number of heads of the queries.
    """
    count = keys.shape[1]
    repeats = math.lcm(count, ranks) // count
    return keys if repeats == 1 else keys.repeat_interleave(repeats, dim=1)


def part_of_row(rows: Tensor, packing: Packing, ranks: SequenceRanks) -> tuple[Tensor, Tensor]:
    """Return the (1, n) token ids and positions of this process's part of a packed row.

    Args:
        rows: (B, L) int64 token ids, right-padded.
        packing: layout of the texts in one row.
        ranks: processes that divide the row.
    """
    row = rows.flatten()[packing.tokens].unsqueeze(0)
    return ranks.part(row), ranks.part(packing.positions)


def layout_of(rows: Tensor, packing: Packing | None, ranks: SequenceRanks | None) -> Packing | None:
    """Return the layout of texts; processes that divide rows need one, in which each padded row is a text.

    Args:
        rows: (B, L) int64 token ids, right-padded.
        packing: layout of the texts in one row; None for padded rows.
        ranks: processes that divide the row; None without any.
    """
    if ranks is None or packing is not None:
        return packing
    count, width = rows.shape
    return pack_texts([width] * count, width, rows.device)
