"""What a run has observed of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError


@dataclass
class RowHistory:
    """Rewards of the responses to each of N rows, as far as the run has seen them.

    Older groups count less: at each new group of a row, the counts of its responses before are multiplied by ``kept``.

    Args:
        solved: (N,) float64 number of solved responses.
        unsolved: (N,) float64 number of other responses.
        groups: (N,) int64 number of groups.
        streak: (N,) int64 number of groups, the last one included, of which all responses were solved.
        spread: (N,) float64 largest minus smallest reward of the last group; NaN before.
        last_step: (N,) int64 index of the step with the last group, -1 before.
        kept: fraction of the counts that remains, in [0, 1].
        step: index of the next step.
    """

    solved: Tensor
    unsolved: Tensor
    groups: Tensor
    streak: Tensor
    spread: Tensor
    last_step: Tensor
    kept: float
    step: int = 0

    @classmethod
    def of(cls, rows: int, kept: float) -> RowHistory:
        """Return the history of rows without any group."""
        return cls(
            solved=torch.zeros(rows, dtype=torch.float64),
            unsolved=torch.zeros(rows, dtype=torch.float64),
            groups=torch.zeros(rows, dtype=torch.int64),
            streak=torch.zeros(rows, dtype=torch.int64),
            spread=torch.full((rows,), torch.nan, dtype=torch.float64),
            last_step=torch.full((rows,), -1, dtype=torch.int64),
            kept=kept,
        )

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def observed(self) -> Tensor:
        """(N,) bool, the rows with at least one group."""
        return self.groups > 0

    @property
    def solve_rate(self) -> Tensor:
        """(N,) float64 fraction of solved responses; NaN without a response."""
        return self.solved / (self.solved + self.unsolved)

    def add(self, row: int, rewards: Sequence[float], threshold: float) -> None:
        """Add a group.

        Args:
            row: number of the row.
            rewards: rewards of its responses, at least one.
            threshold: smallest reward of a solved response.
        """
        solved = sum(reward >= threshold for reward in rewards)
        for counts, count in ((self.solved, solved), (self.unsolved, len(rewards) - solved)):
            counts[row] = counts[row] * self.kept + count
        self.groups[row] += 1
        self.streak[row] = self.streak[row] + 1 if solved == len(rewards) else 0
        self.spread[row] = max(rewards) - min(rewards)
        self.last_step[row] = self.step

    def state_dict(self) -> dict[str, Tensor | int]:
        """Return a copy of the history, for a checkpoint."""
        return {name: value.clone() for name, value in self._tensors().items()} | {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Tensor | int]) -> None:
        """Take the history of a checkpoint.

        Raises:
            UsageError: it is of another number of rows.
        """
        rows = len(torch.as_tensor(state["groups"]))
        if rows != len(self):
            raise UsageError(
                f"the sampler of the checkpoint has observed {rows} training rows, but there are {len(self)}: resume "
                f"with the same data, or begin a new run"
            )
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.as_tensor(state[name]))
        self.step = int(state["step"])

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}
