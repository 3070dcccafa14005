"""A data loader that a checkpoint can stop anywhere and resume at the next batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_rlhf.batching.shares import balanced_shares
from lightning_rlhf.data.samplers import Sampler, shuffle


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
        return iter(shuffle(self.size, self.seed, self.epoch) if self.shuffle else range(self.size))


class SamplerOrder(EpochOrder):
    """The order of rows that a sampler gives.

    A row that comes again in an epoch has a number of its own, larger by the number of rows each time: completions are
    drawn from seeds made of it, and would be the same ones again.

    Args:
        sampler: that gives it.
        keys: what the sampler remembers of each row.
        lengths: tokens of each row.
        seed: of the order.
    """

    def __init__(self, sampler: Sampler, keys: Sequence[Any], lengths: Sequence[int], seed: int) -> None:
        self._sampler, self._keys, self._lengths, self._seed = sampler, keys, lengths, seed
        super().__init__(len(sampler.order(keys, lengths, seed, 0)), seed, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        order = [int(row) for row in self._sampler.order(self._keys, self._lengths, self._seed, self.epoch)]
        name, rows = type(self._sampler).__name__, len(self._keys)
        if len(order) != self.size:
            raise ValueError(f"{name} orders {len(order)} rows in epoch {self.epoch}, and {self.size} in epoch 0")
        if wrong := [row for row in order if not 0 <= row < rows]:
            raise ValueError(f"{name} names row {wrong[0]} in epoch {self.epoch}, expected 0 to {rows - 1}")
        before = Counter[int]()
        for place, row in enumerate(order):
            order[place] += rows * before[row]
            before[row] += 1
        return iter(order)


class _Batches:
    """This rank's rows of whole batches of an order, from a given batch on, each with its place in the batch.

    ``sampler`` is the name Lightning looks for.
    """

    def __init__(self, sampler: EpochOrder, batch_size: int, lengths: Sequence[int], rank: int, ranks: int) -> None:
        self.sampler, self.batch_size, self.start = sampler, batch_size, 0
        self._lengths, self._rank, self._ranks = lengths, rank, ranks

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, lengths = list(self.sampler), self._lengths
        for batch in range(self.start, len(self)):
            numbers = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            places = balanced_shares([lengths[number % len(lengths)] for number in numbers], self._ranks)[self._rank]
            yield [(place, numbers[place]) for place in places]


class _Places:
    """A dataset that hands on what it is asked for."""

    def __getitem__(self, asked: tuple[int, int]) -> tuple[int, int]:
        return asked


Collate = Callable[[list[Any], list[int], list[int], int], Any]


class ResumableLoader(DataLoader[Any]):
    """Shuffled batches whose position is part of the checkpoint. Lightning saves and restores the two-method state.

    Rows are tokenised beforehand, so there are no workers, and a batch counts as read when it is handed out. The
    position counts batches over all ranks, so it means the same whatever their number.

    Args:
        rows: all of them.
        batch_size: rows per batch, over all ranks; the rest of an epoch that fills no batch is left out.
        collate: makes a batch of some rows, their numbers, their places in the batch over all ranks, and the epoch.
        seed: of the order.
        shuffle: False keeps the order of the data.
        lengths: tokens of each row, by which a batch is shared among ranks; None takes all for equal.
        rank: whose share this is, in [0, ranks).
        ranks: that share each batch.
        order: of each epoch; None takes that of ``seed`` and ``shuffle``.

    Raises:
        ValueError: fewer rows than one batch, or a batch that leaves a rank without a row.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        batch_size: int,
        collate: Collate,
        seed: int,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
        rank: int = 0,
        ranks: int = 1,
        order: EpochOrder | None = None,
    ) -> None:
        self._order = EpochOrder(len(rows), seed, shuffle) if order is None else order
        if len(self._order) < batch_size:
            raise ValueError(
                f"batch_size is {batch_size}, but the training data have only {len(self._order)} rows that can be "
                f"used: give a batch_size of at most {len(self._order)}, or more data"
            )
        if batch_size < ranks:
            raise ValueError(
                f"batch_size {batch_size} leaves some of {ranks} ranks without a row: give at least {ranks}"
            )
        self._position = 0
        self._resume_at = 0
        lengths = [1] * len(rows) if lengths is None else lengths
        self._batches = _Batches(self._order, batch_size, lengths, rank, ranks)

        def collated(drawn: list[tuple[int, int]]) -> Any:
            places, numbers = (list(column) for column in zip(*drawn, strict=True))
            return collate([rows[number % len(rows)] for number in numbers], numbers, places, self._order.epoch)

        super().__init__(
            _Places(),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=collated,
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


class HeldOutBatches:
    """Every row once, in order: this rank's share of each batch. ``sampler`` is the name Lightning looks for.

    A last batch with fewer rows than ranks is joined to the one before, so that every rank always has a row; so is one
    of a single row, which would have no other text's answer for KTO's KL.

    Args:
        rows: number of them, at least ``ranks``.
        batch_size: rows per batch, over all ranks.
        rank: whose share this is, in [0, ranks).
        ranks: that share each batch.

    Raises:
        ValueError: fewer rows than ranks.
    """

    def __init__(self, rows: int, batch_size: int, rank: int, ranks: int) -> None:
        if rows < ranks:
            raise ValueError(f"{rows} validation rows cannot be shared by {ranks} ranks: give at least {ranks}")
        least = max(ranks, min(batch_size, 2))
        starts = [start for start in range(0, rows, max(batch_size, ranks)) if start == 0 or rows - start >= least]
        self.sampler = range(rows)
        self._ends = list(zip(starts, [*starts[1:], rows], strict=True))
        self._rank, self._ranks = rank, ranks

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in self._ends:
            yield list(range(start + self._rank, end, self._ranks))
