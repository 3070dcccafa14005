"""Another reward function for each source of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lightning_rlhf.rewards.adapter import RewardFunction


class BySource:
    """Gives each completion to the function of its ``data_source``.

    Args:
        functions: by pattern of the source, as shells have them (``openai/gsm8k``, ``aime*``); the first that fits is
            taken, so ``"*"`` comes last. Each is called as if it stood alone, with its completions only.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        if not functions:
            raise ValueError("BySource needs at least one pattern with its function")
        self.per_sample = all(getattr(function, "per_sample", False) for function in functions.values())
        self.dry_call = all(getattr(function, "dry_call", True) for function in functions.values())
        self.rewards = {pattern: RewardFunction(function) for pattern, function in functions.items()}

    def __call__(self, completions: list[Any], data_source: list[str], **columns: Any) -> list[float | None]:
        """The reward of each completion.

        Args:
            completions: the responses.
            data_source: of each.
            **columns: all else that is offered.

        Raises:
            ValueError: no pattern fits a source.
        """
        columns |= {"completions": completions, "data_source": data_source}
        places: dict[str, list[int]] = {}
        for i, source in enumerate(data_source):
            places.setdefault(self._pattern(source), []).append(i)
        found: list[float | None] = [None] * len(completions)
        for pattern, rows in places.items():
            given = {name: [values[i] for i in rows] for name, values in columns.items() if isinstance(values, list)}
            for i, value in zip(rows, self.rewards[pattern](**given).tolist(), strict=True):
                found[i] = None if math.isnan(value) else value
        return found

    def _pattern(self, source: str) -> str:
        for pattern in self.rewards:
            if fnmatchcase(source, pattern):
                return pattern
        raise ValueError(
            f"no reward function for data_source {source!r}: there are {list(self.rewards)}; '*' is for all"
        )
