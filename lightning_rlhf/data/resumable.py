"""A data loader that a checkpoint can stop anywhere and resume at the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_rlhf.seeding import derive_seed


class EpochOrder:
    """The order of rows in each epoch: a pure function of seed and epoch.

    Args:
        size: number of rows.
        seed: of the order.
        shuffle: False keeps the order of the data.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle, self.epoch = size, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "row order", self.epoch))
        return iter(torch.randperm(self.size, generator=generator).tolist())


class _Batches:
    """Whole batches of an order, from a given batch on. ``sampler`` is the name Lightning looks for."""

    def __init__(self, sampler: EpochOrder, batch_size: int) -> None:
        self.sampler, self.batch_size, self.start = sampler, batch_size, 0

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for batch in range(self.start, len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


class ResumableLoader(DataLoader[Any]):
    """Shuffled batches whose position is part of the checkpoint. Lightning saves and restores the two-method state.

    Rows are tokenised beforehand, so there are no workers, and a batch counts as read when it is handed out.

    Args:
        rows: all of them.
        batch_size: rows per batch; the rest of an epoch that fills no batch is left out.
        collate: makes a batch of some rows, their numbers and the epoch.
        seed: of the order.
        shuffle: False keeps the order of the data.

    Raises:
        ValueError: fewer rows than one batch.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        batch_size: int,
        collate: Callable[[list[Any], list[int], int], Any],
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if len(rows) < batch_size:
            raise ValueError(f"{len(rows)} rows make no batch of {batch_size}: lower batch_size or give more data")
        self._order = EpochOrder(len(rows), seed, shuffle)
        self._position = 0
        self._resume_at = 0
        self._batches = _Batches(self._order, batch_size)
        super().__init__(
            range(len(rows)),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=lambda numbers: collate([rows[i] for i in numbers], numbers, self._order.epoch),
            # Each pass draws a seed for workers; drawn from the global generator, a resumed epoch would draw one more.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Runs at the first next(), when Lightning has set the epoch.
        self._position = self._batches.start = self._resume_at
        self._resume_at = 0
        for batch in super().__iter__():
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches of the present epoch were handed out."""
        return {"batches": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind the batches of that state; a finished epoch starts the next from its beginning."""
        self._position = state["batches"]
        self._resume_at = self._position % len(self._batches)
