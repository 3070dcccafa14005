"""A separate reward function for each source of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rewards.results import RESERVED_METRICS


class BySource:
    """Scores each completion with the function for its ``data_source``.

    Use it if you mix data sets that need different rewards.

    Args:
        functions: functions by shell pattern of the source (``openai/gsm8k``, ``aime*``). The first matching pattern is
            used, so put ``"*"`` last. Each function receives only the completions of its sources.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        if not functions:
            raise UsageError("BySource needs at least one pattern with its function")
        self.per_sample = all(getattr(function, "per_sample", False) for function in functions.values())
        self.dry_call = all(getattr(function, "dry_call", True) for function in functions.values())
        self.rewards = {pattern: RewardFunction(function) for pattern, function in functions.items()}

    def __call__(
        self,
        completions: list[Any],
        data_source: list[str],
        trainer_state: TrainerState | None = None,
        log_extra: Callable[[str, list[float]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Compute the reward of each completion.

        Args:
            completions: responses.
            data_source: source of each response.
            trainer_state: progress of the run, for functions that use it.
            log_extra: function that logs the further numbers of all functions.
            **columns: all other columns.

        Raises:
            ValueError: no pattern matches a source.
        """
        columns |= {"completions": completions, "data_source": data_source}
        rows_by_pattern: dict[str, list[int]] = {}
        for row, source in enumerate(data_source):
            rows_by_pattern.setdefault(self._pattern(source), []).append(row)
        values: list[float | None] = [None] * len(completions)
        for pattern, rows in rows_by_pattern.items():
            reward = self.rewards[pattern]
            selected = {
                name: [column[row] for row in rows] for name, column in columns.items() if isinstance(column, list)
            }
            with RewardExecutor([reward]) as executor:
                try:
                    scored = executor.score(selected, trainer_state)
                except RuntimeError as error:
                    # Raise the original error: the caller's message adds the row and on_error.
                    raise error.__cause__ or error from None
            for row, value in zip(rows, scored.rewards[reward.label].tolist(), strict=True):
                values[row] = None if math.isnan(value) else value
            for metric, (total, count) in scored.metrics.items():
                name = metric.removeprefix(f"reward_{reward.label}/")
                if log_extra is not None and name not in RESERVED_METRICS:
                    log_extra(name, [total / count] * int(count))
        return values

    def close(self) -> None:
        """Release the functions' resources."""
        for reward in self.rewards.values():
            reward.close()

    def _pattern(self, source: str) -> str:
        for pattern in self.rewards:
            if fnmatchcase(str(source), pattern):
                return pattern
        raise UsageError(
            f"no reward function for data_source {source!r}; patterns: {list(self.rewards)} ('*' matches all sources)"
        )
