"""Log-probs of given texts under the policy at the start of a run, which take the place of a reference."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.strategies import ranks
from lightning_rlhf.types import SequenceBatch

log = logging.getLogger(__name__)
_ROWS = 256  # rows that are evaluated together, in micro-batches


class StartLogprobs:
    """Log-prob of each text of the data before the first update, which checkpoints contain."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def measure(
        self, data: RowsDataModule, rank: int, size: int, evaluate: Callable[[Any], tuple[SequenceBatch, Tensor]]
    ) -> None:
        """Evaluate all rows of the data, each on one rank. All ranks.

        A rank without rows left evaluates its first row again, because a sharded forward pass needs all ranks.

        Args:
            data: data module that was set up.
            rank: number of this rank.
            size: number of ranks with different data.
            evaluate: function of a batch that returns its texts and their (B,) log-probs.
        """
        examples = [example for part in data.examples.values() for example in part]
        of_rank = examples[rank::size] or examples[:1]
        for start in range(0, -(-len(examples) // size), _ROWS):
            chosen = of_rank[start : start + _ROWS] or of_rank[:1]
            numbers = list(range(len(chosen)))
            texts, values = evaluate(data.collate(chosen, numbers, numbers, 0))
            self._values |= dict(zip(keys_of(texts), values.tolist(), strict=True))
        for values_of_rank in ranks.from_all_ranks(self._values):
            self._values |= values_of_rank
        log.info("The reference is the policy before training, which has evaluated %d texts.", len(self._values))

    def of(self, texts: SequenceBatch) -> Tensor:
        """Return (B,) the log-probs of some texts.

        Raises:
            RuntimeError: a text was not among the data at the start of the run.
        """
        try:
            values = [self._values[key] for key in keys_of(texts)]
        except KeyError as error:
            raise RunError(
                "a text was not in the data at the start of the run, so that ref: start has no log-prob for it: use "
                "the same data, or another ref"
            ) from error
        return torch.tensor(values, dtype=torch.float64, device=texts.input_ids.device)

    def state(self) -> dict[str, Tensor]:
        """Return the values as tensors."""
        return {
            "keys": torch.tensor(list(self._values), dtype=torch.int64),
            "values": torch.tensor(list(self._values.values()), dtype=torch.float64),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the result of :meth:`state`."""
        self._values = dict(zip(state["keys"].tolist(), state["values"].tolist(), strict=True))


def keys_of(texts: SequenceBatch) -> Sequence[int]:
    """Return a number for each text, equal for equal tokens and loss masks."""
    rows = zip(texts.input_ids.cpu(), texts.loss_mask.cpu(), texts.lengths.tolist(), strict=True)
    keys = []
    for ids, mask, length in rows:
        content = ids[:length].numpy().tobytes() + mask[:length].numpy().tobytes()
        keys.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1)
    return keys
