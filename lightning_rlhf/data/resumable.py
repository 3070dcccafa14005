"""A data loader that resumes from a checkpoint at the next batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_rlhf.batching.shares import balanced_shares
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.samplers import Sampler, shuffle
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.run_checks import check_batch_size


class EpochOrder:
    """The order of rows in each epoch: a pure function of seed and epoch.

    Args:
        size: number of rows.
        seed: seed of the order.
        shuffle: False keeps the order of the data.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows(self.epoch))

    def rows(self, epoch: int) -> Sequence[int]:
        """Return the row numbers of an epoch in order. A subclass may choose them when a slice of them is read.

        The k-th repetition of a row in an epoch has the row's number plus k times the number of rows. The seed of a
        completion is derived from this number, so that repetitions get different completions.
        """
        return shuffle(self.size, self.seed, epoch) if self.shuffle else range(self.size)


@runtime_checkable
class ObservingSampler(Protocol):
    """Protocol of a sampler that chooses each batch by what the run has observed, such as the rewards of rows.

    :class:`~lightning_rlhf.extras.samplers.adaptive.Adaptive` is one. In YAML, you set it by ``class_path``.
    """

    def key(self, fields: Fields) -> Any:
        """Return the value of a row that the order needs, or raise :class:`BadRow`."""

    def attach(self, trainer: Trainer) -> None:
        """Add the callback that observes the run and keeps the state in its checkpoints. Called at each setup."""

    def row_order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, batch_size: int) -> EpochOrder:
        """Return the order. Its batches are read one after the other, each just before its responses are requested.

        Args:
            keys: keys of all rows.
            lengths: tokens of all rows.
            batch_size: rows per batch, over all ranks.
        """


class SamplerOrder(EpochOrder):
    """The order of rows that a sampler returns.

    Args:
        sampler: sampler that orders the rows.
        keys: the sampler's key of each row.
        lengths: tokens of each row.
        seed: seed of the order.
    """

    def __init__(self, sampler: Sampler, keys: Sequence[Any], lengths: Sequence[int], seed: int) -> None:
        self._sampler = sampler
        self._keys = keys
        self._lengths = lengths
        self._seed = seed
        super().__init__(len(sampler.order(keys, lengths, seed, 0)), seed, shuffle=False)

    def rows(self, epoch: int) -> Sequence[int]:
        """Return the row numbers of an epoch in order.

        Raises:
            ValueError: the sampler returned row numbers that are not valid.
        """
        order = [int(row) for row in self._sampler.order(self._keys, self._lengths, self._seed, epoch)]
        name, rows = type(self._sampler).__name__, len(self._keys)
        if len(order) != self.size:
            raise UsageError(f"{name} returned {len(order)} rows in epoch {epoch}, but {self.size} in epoch 0")
        if invalid := [row for row in order if not 0 <= row < rows]:
            raise UsageError(f"{name} returned row {invalid[0]} in epoch {epoch}, expected 0 to {rows - 1}")
        repetitions = Counter[int]()
        for position, row in enumerate(order):
            order[position] += rows * repetitions[row]
            repetitions[row] += 1
        return order


class _RankBatches:
    """This rank's rows of each full batch, from batch ``start``, as pairs (position in the batch, row number).

    Lightning expects the attribute name ``sampler``.
    """

    def __init__(self, sampler: EpochOrder, batch_size: int, lengths: Sequence[int], rank: int, ranks: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.start = 0
        self._lengths = lengths
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = self.sampler.rows(self.sampler.epoch)
        for batch in range(self.start, len(self)):
            yield self.rows_of_batch(order, batch)

    def rows_of_batch(self, order: Sequence[int], batch: int) -> list[tuple[int, int]]:
        """Return this rank's rows of a batch.

        Args:
            order: row numbers of the epoch in order.
            batch: number of the batch in the epoch.
        """
        numbers = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        lengths = [self._lengths[number % len(self._lengths)] for number in numbers]
        return [(position, numbers[position]) for position in balanced_shares(lengths, self._ranks)[self._rank]]


class _IdentityDataset:
    """A dataset that returns its index, so that collate receives positions and row numbers."""

    def __getitem__(self, index: tuple[int, int]) -> tuple[int, int]:
        return index


Collate = Callable[[list[Any], list[int], list[int], int], Any]


class ResumableLoader(DataLoader[Any]):
    """Shuffled batches whose position Lightning saves in checkpoints and restores.

    Rows are already tokenized, so there are no worker processes, and a batch counts as read when it is yielded. The
    position counts batches over all ranks, so it does not depend on the number of ranks.

    Args:
        rows: all examples.
        batch_size: rows per batch, over all ranks; the last rows of an epoch that do not fill a batch are skipped.
        collate: function that builds a batch from examples, their row numbers, their positions in the batch over all
            ranks, and the epoch.
        seed: seed of the order.
        shuffle: False keeps the order of the data.
        lengths: tokens of each row, by which batches are balanced over ranks; None balances by rows.
        rank: data rank of this process, in [0, ranks).
        ranks: number of data ranks.
        order: order of each epoch; None uses ``seed`` and ``shuffle``.

    Raises:
        ValueError: there are fewer rows than one batch, or fewer rows in a batch than ranks.
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
        check_batch_size(batch_size, len(self._order))
        if batch_size < ranks:
            raise UsageError(f"batch_size is {batch_size}, but each of {ranks} ranks needs a row: use at least {ranks}")
        self._position = 0
        self._resume_at = 0
        lengths = [1] * len(rows) if lengths is None else lengths
        self._batches = _RankBatches(self._order, batch_size, lengths, rank, ranks)

        def collate_rows(drawn: list[tuple[int, int]], epoch: int | None = None) -> Any:
            positions, numbers = (list(column) for column in zip(*drawn, strict=True))
            epoch = self._order.epoch if epoch is None else epoch
            return collate([rows[number % len(rows)] for number in numbers], numbers, positions, epoch)

        self._collate_rows = collate_rows
        self._last_order: tuple[int, Sequence[int]] = (-1, [])  # epoch and its rows, of the last call of batch_at
        super().__init__(
            _IdentityDataset(),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=collate_rows,
            # Each iterator draws a seed for workers; with the global generator, a resumed run would draw one more.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Runs at the first next(), after Lightning has set the epoch.
        self._position = self._batches.start = self._resume_at
        self._resume_at = 0
        for batch in super().__iter__():
            self._position += 1
            yield batch

    def batch_at(self, epoch: int, batch: int) -> Any:
        """Return this rank's part of any batch; the position in the data does not change.

        Args:
            epoch: number of completed passes over the data.
            batch: number of the batch in the epoch.
        """
        if self._last_order[0] != epoch:
            self._last_order = epoch, self._order.rows(epoch)
        return self._collate_rows(self._batches.rows_of_batch(self._last_order[1], batch), epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches of the current epoch that were yielded."""
        return {"batches": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the batches of the state; after a finished epoch, begin the next one."""
        self._position = state["batches"]
        self._resume_at = self._position % len(self._batches)


class HeldOutBatches:
    """This rank's rows of each batch; every row once, in order. Lightning expects the attribute name ``sampler``.

    A last batch with fewer rows than ranks is merged with the previous batch, so that every rank has a row. A last
    batch of one row is merged too, because KTO estimates the KL from prompts paired with other rows' answers.

    Args:
        rows: number of rows, at least ``ranks``.
        batch_size: rows per batch, over all ranks.
        rank: data rank of this process, in [0, ranks).
        ranks: number of data ranks.

    Raises:
        ValueError: there are fewer rows than ranks.
    """

    def __init__(self, rows: int, batch_size: int, rank: int, ranks: int) -> None:
        if rows < ranks:
            raise UsageError(
                f"there are {rows} validation rows, but each of {ranks} ranks needs one: use at least {ranks}"
            )
        smallest = max(ranks, min(batch_size, 2))
        starts = [start for start in range(0, rows, max(batch_size, ranks)) if start == 0 or rows - start >= smallest]
        self.sampler = range(rows)
        self._ends = list(zip(starts, [*starts[1:], rows], strict=True))
        self._rank, self._ranks = rank, ranks

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in self._ends:
            yield list(range(start + self._rank, end, self._ranks))
