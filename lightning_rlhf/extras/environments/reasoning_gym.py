"""Tasks of reasoning-gym: rows with questions, and their scores. They have one turn, and so no environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lightning_rlhf.data.row import Row
from lightning_rlhf.expected_errors import MissingPackageError


@dataclass(frozen=True)
class ReasoningGym:
    """Reads questions of a reasoning-gym dataset, as columns ``prompt``, ``answer``, ``entry`` and ``dataset``.

    Use it as the ``train`` or ``val`` of your data, with :func:`score` as the reward function. The same seed gives you
    the same rows.

    Args:
        dataset: name of the dataset, such as ``chain_sum``.
        num_rows: rows to draw.
        seed: seed of the rows.
        arguments: further arguments of the dataset, such as its difficulty.
    """

    dataset: str
    num_rows: int
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        data = _module().create_dataset(self.dataset, seed=self.seed, size=self.num_rows, **self.arguments)
        for number in range(self.num_rows):
            entry = data[number]
            yield (
                f"{self.dataset} {number}",
                {
                    "prompt": entry["question"],
                    "answer": entry["answer"],
                    "entry": json.dumps(entry, default=str),
                    "dataset": self.dataset,
                },
            )


def score(completions: list[str], entry: list[str], dataset: list[str]) -> list[float]:
    """Return the scores of the datasets, in [0, 1]; wrong answers may have a small positive score.

    Args:
        completions: answers.
        entry: entries of the datasets as JSON, from :class:`ReasoningGym`.
        dataset: names of the datasets.
    """
    return [
        float(_scorer(name).score_answer(text, json.loads(task)))
        for text, task, name in zip(completions, entry, dataset, strict=True)
    ]


@lru_cache
def _scorer(dataset: str) -> Any:
    return _module().create_dataset(dataset, seed=0, size=1)


def _module() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "ReasoningGym needs reasoning-gym: run pip install 'lightning-rlhf[reasoning-gym]'"
        ) from error
    return reasoning_gym
