"""The order of the rows of an epoch.

A :class:`Sampler` has no state: its order is a pure function of the data, the run's seed and the epoch, so a run that
is resumed in the middle of an epoch continues in the same order. An ``ObservingSampler`` of
:mod:`lightning_rlhf.data.resumable` chooses each batch by what the run has observed, which its checkpoints contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.functional.seeding import derive_seed


@runtime_checkable
class Sampler(Protocol):
    """Protocol of an object that orders the rows of an epoch. In YAML, you set it by ``class_path``.

    Your order must depend only on the arguments of :meth:`order`, so that a run resumed in the middle of an epoch
    continues in the same order.
    """

    def key(self, fields: Fields) -> Any:
        """Return the value of a row that :meth:`order` needs, or raise :class:`BadRow`."""

    def order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, epoch: int) -> Sequence[int]:
        """Return the row numbers of an epoch. Every epoch must contain the same number of rows.

        Args:
            keys: keys of all rows.
            lengths: tokens of all rows.
            epoch: number of completed epochs.
        """


def shuffle(size: int, seed: int, epoch: int, *purpose: int | str) -> list[int]:
    """Return a random permutation of ``range(size)`` that depends on seed, epoch and purpose."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "row order", epoch, *purpose))
    return torch.randperm(size, generator=generator).tolist()
