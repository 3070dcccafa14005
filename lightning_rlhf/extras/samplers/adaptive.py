"""Adaptive: rows are read by the rewards that their responses got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.resumable import EpochOrder
from lightning_rlhf.data.samplers import Sampler, shuffle
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.samplers.feedback import RewardFeedback
from lightning_rlhf.extras.samplers.history import RowHistory
from lightning_rlhf.extras.samplers.row_weights import RowWeights
from lightning_rlhf.functional.seeding import derive_seed
from lightning_rlhf.ranges import check_ranges


@dataclass(eq=False)
class Adaptive:
    """Reads rows by the rewards that their responses got: the product of the weights of its parts decides how often.

    The rows are passed in a shuffled order, pass after pass. A row with the largest weight is read in every pass, and
    one with a tenth of it in every tenth on average. If all weights are equal and ``batch_size`` divides the rows, you
    get the shuffled order of a run without a sampler. No row is in a batch twice. If too few rows have a weight above
    0, the batch is filled with others, and ``sampler/filled_fraction`` counts them. With ``max_staleness`` k, a batch
    is chosen k steps before it is trained on, by the rewards that are known then.

    Args:
        parts: what weighs rows, such as ``Pools`` and ``Gates``.
        solved: smallest reward of a solved response.
        reward: name of the reward that is compared with ``solved``. None takes the total reward, with the reward
            model's score.
        kept: how much earlier responses to a row count when it gets new ones, in [0, 1]. 0 uses the last group only, 1
            all of them equally.
        base: sampler that orders the rows of each pass. None shuffles them.
    """

    parts: list[RowWeights]
    solved: float = 1.0
    reward: str | None = None
    kept: float = 0.5
    base: Sampler | None = None
    _feedback: RewardFeedback | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, kept="in [0, 1]")
        if not self.parts:
            raise UsageError("parts of Adaptive is empty: give it at least one, such as Pools, or remove the sampler")

    def key(self, fields: Fields) -> Any:
        """Return the keys of the parts and of the base."""
        return [part.key(fields) for part in self.parts], None if self.base is None else self.base.key(fields)

    def attach(self, trainer: Trainer) -> None:
        """Add the callback that observes rewards; see :class:`~lightning_rlhf.data.resumable.ObservingSampler`."""
        callbacks: list[Any] = trainer.callbacks
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, RewardFeedback)]
        self._feedback = RewardFeedback(self.reward)
        callbacks.insert(0, self._feedback)  # before those that write metrics or save checkpoints

    def row_order(self, keys: Sequence[Any], lengths: Sequence[int], seed: int, batch_size: int) -> EpochOrder:
        """Return the order of rows; see :class:`~lightning_rlhf.data.resumable.ObservingSampler`."""
        size = len(keys) if self.base is None else len(self.base.order([key[1] for key in keys], lengths, seed, 0))
        order = AdaptiveOrder(self, keys, lengths, seed, batch_size=batch_size, size=size)
        if self._feedback is not None:
            self._feedback.use(order)
        return order


class AdaptiveOrder(EpochOrder):
    """Chooses batches one after the other, and remembers them until they are observed.

    Args:
        sampler: settings.
        keys: keys of all rows.
        lengths: tokens of all rows.
        seed: seed of the run.
        batch_size: rows of a batch, over all ranks.
        size: number of rows of an epoch.

    Attributes:
        history: what was observed.
        filled: number of rows of each chosen batch whose weight is 0, by the number of the batch.
    """

    def __init__(
        self, sampler: Adaptive, keys: Sequence[Any], lengths: Sequence[int], seed: int, batch_size: int, size: int
    ) -> None:
        super().__init__(size, seed, shuffle=False)
        if batch_size > len(keys):
            raise UsageError(f"batch_size is {batch_size}, but Adaptive reads no row twice in a batch of {len(keys)}")
        self.batch_size = batch_size
        self.history = RowHistory.of(len(keys), sampler.kept)
        self.filled: dict[int, int] = {}
        self._sampler = sampler
        self._keys = keys
        self._lengths = lengths
        self._batches: dict[int, list[int]] = {}  # chosen rows, with their repetitions, by the number of the batch
        self._position = 0  # in the passes: number of the pass times the number of its rows, plus the row in it
        self._pass: tuple[int, Sequence[int], Tensor] = (-1, [], torch.empty(0))  # number, rows, draw of each
        self._repetitions: tuple[int, Counter[int]] = (-1, Counter())  # epoch, and how often it has had each row
        self._returned: list[int] = []  # rows of earlier batches to which nothing was generated

    def rows(self, epoch: int) -> Sequence[int]:
        """Return the rows of an epoch; each batch is chosen when it is read for the first time."""
        return _Epoch(self, epoch)

    def batch(self, epoch: int, number: int) -> list[int]:
        """Return the rows of a batch of an epoch, with their repetitions in it."""
        total = epoch * (self.size // self.batch_size) + number
        if total not in self._batches:
            rows, self.filled[total] = self._choose()
            if self._repetitions[0] != epoch:
                self._repetitions = epoch, Counter()
            repetitions = self._repetitions[1]
            self._batches[total] = [row + repetitions[row] * len(self._keys) for row in rows]
            repetitions.update(rows)
        return self._batches[total]

    def weights(self) -> Tensor:
        """Return the product of the weights of the parts, (N,) float64.

        Raises:
            UsageError: a part returned weights that are not valid.
        """
        product = torch.ones(len(self._keys), dtype=torch.float64)
        for number, part in enumerate(self._sampler.parts):
            weights = torch.as_tensor(part.weights(self.history, [key[0][number] for key in self._keys]))
            if weights.shape != product.shape or not (weights.isfinite() & (weights >= 0)).all():
                raise UsageError(
                    f"{type(part).__name__} returned weights of shape {tuple(weights.shape)} from {weights.min()} to "
                    f"{weights.max()}, expected {len(product)} finite weights of at least 0"
                )
            product *= weights
        return product

    def _choose(self) -> tuple[list[int], int]:
        """Return the rows of the next batch, and how many of them have no weight."""
        weights = self.weights()
        probabilities = (weights / weights.max().clamp(min=torch.finfo(torch.float64).tiny)).tolist()
        chosen = dict.fromkeys(self._returned[: self.batch_size])
        self._returned = self._returned[self.batch_size :]
        for _ in range(2 * self.size):  # any row with the largest weight is passed at least once
            if len(chosen) == self.batch_size:
                break
            row, draw = self._next()
            if draw < probabilities[row]:
                chosen[row] = None
        missing = self.batch_size - len(chosen)
        # A pass of a base may lack rows.
        others = [row for row in dict.fromkeys([*self._pass[1], *range(len(self._keys))]) if row not in chosen]
        filling = sorted(others, key=lambda row: -probabilities[row])[:missing]
        return [*chosen, *filling], sum(probabilities[row] == 0 for row in filling)

    def _next(self) -> tuple[int, float]:
        """Return the next row of the passes, and its draw in [0, 1) in this pass."""
        number, index = divmod(self._position, self.size)
        if self._pass[0] != number:
            self._pass = number, self._rows_of_pass(number), self._draws(number)
        self._position += 1
        return self._pass[1][index], float(self._pass[2][index])

    def _rows_of_pass(self, number: int) -> Sequence[int]:
        base = self._sampler.base
        if base is None:
            return shuffle(len(self._keys), self.seed, number)
        return [int(row) for row in base.order([key[1] for key in self._keys], self._lengths, self.seed, number)]

    def _draws(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "adaptive", number))
        return torch.rand(self.size, generator=generator, dtype=torch.float64)

    # -- observations and state -------------------------------------------------------------------------------

    def observe(self, groups: Mapping[int, Sequence[float]], step: int) -> None:
        """Add the rewards of a step, and forget its batch.

        Args:
            groups: rewards of the responses to each row of the step, by its number with repetitions. They are empty
                for a row without rewards, and missing for one to which nothing was generated.
            step: index of the step.
        """
        self.history.step = step
        threshold = float(torch.tensor(self._sampler.solved, dtype=torch.float32))  # rewards were rounded to it too
        for number in sorted(groups):
            if groups[number]:
                self.history.add(number % len(self._keys), groups[number], threshold)
        self.history.step = step + 1
        oldest = min(self._batches, default=0)
        rows = self._batches.pop(oldest, [])
        self.filled.pop(oldest, None)
        returned = [number % len(self._keys) for number in rows if number not in groups]
        self._returned = list(dict.fromkeys([*self._returned, *returned]))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, for a checkpoint."""
        epoch, repetitions = self._repetitions
        return {
            "history": self.history.state_dict(),
            "batches": {number: list(rows) for number, rows in self._batches.items()},
            "filled": dict(self.filled),
            "position": self._position,
            "repetitions": (epoch, dict(repetitions)),
            "returned": list(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.history.load_state_dict(state["history"])
        self._batches = {number: list(rows) for number, rows in state["batches"].items()}
        self.filled = dict(state["filled"])
        self._position = state["position"]
        self._returned = list(state["returned"])
        epoch, repetitions = state["repetitions"]
        self._repetitions = epoch, Counter(repetitions)


class _Epoch(Sequence[int]):
    """Rows of an epoch, which are chosen batch by batch as slices of them are read."""

    def __init__(self, order: AdaptiveOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        size = self._order.batch_size
        if isinstance(index, int):
            return self._order.batch(self._epoch, index // size)[index % size]
        start, stop, _ = index.indices(len(self))
        return [
            row for batch in range(start // size, -(-stop // size)) for row in self._order.batch(self._epoch, batch)
        ]

    def __iter__(self) -> Iterator[int]:
        raise TypeError("the rows of an epoch are not known before its batches are read")
