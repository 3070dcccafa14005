"""Another reward function for each source of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.rewards.conventions import COUNTED, TrainerState
from lightning_rlhf.rewards.dispatch import Jury
from lightning_rlhf.rewards.scoring import Scoring


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

    def __call__(
        self,
        completions: list[Any],
        data_source: list[str],
        trainer_state: TrainerState | None = None,
        log_extra: Callable[[str, list[float]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The reward of each completion.

        Args:
            completions: the responses.
            data_source: of each.
            trainer_state: for functions that ask for it.
            log_extra: is told of the further numbers of all functions.
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
            reward = self.rewards[pattern]
            with Jury([reward]) as jury:
                try:
                    scores = Scoring(jury, trainer_state).finish(given)
                except RuntimeError as fault:
                    # Whose row it was, and what on_error can do, is said by who called us.
                    raise fault.__cause__ or fault from None
            for i, value in zip(rows, scores.rewards[reward.label].tolist(), strict=True):
                found[i] = None if math.isnan(value) else value
            for metric, (total, count) in scores.told.items():
                name = metric.removeprefix(f"reward_{reward.label}/")
                if log_extra is not None and name not in COUNTED:
                    log_extra(name, [total / count] * int(count))
        return found

    def close(self) -> None:
        """End what the functions hold."""
        for reward in self.rewards.values():
            reward.close()

    def _pattern(self, source: str) -> str:
        for pattern in self.rewards:
            if fnmatchcase(str(source), pattern):
                return pattern
        raise ValueError(
            f"no reward function for data_source {source!r}: there are {list(self.rewards)}; '*' is for all"
        )
