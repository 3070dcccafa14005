"""Advantages by a separate estimator for each source of prompts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.objectives.base import AdvantageEstimator, AdvantageInputs


@dataclass(frozen=True)
class AdvantagesBySource(AdvantageEstimator):
    """Advantages by a separate estimator for each source of prompts, from the responses of that source alone.

    Advantages and returns of other sources are 0.

    Args:
        estimators: estimator of each source, by its name.
        numbers: number of each source of the data, by its name.

    Raises:
        ValueError: an estimator needs a critic or greedy responses.
    """

    estimators: dict[str, AdvantageEstimator] = field(hash=False)
    numbers: dict[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, estimator in self.estimators.items():
            if estimator.needs_critic or estimator.needs_greedy:
                needed = "a critic" if estimator.needs_critic else "a greedy response to each prompt"
                raise UsageError(
                    f"{type(estimator).__name__} of the source {name!r} needs {needed}, which a mixture does not have: "
                    f"use another estimator, such as GRPO"
                )
        for need in ("needs_groups", "needs_sum_pi_squared", "needs_ref", "needs_rewards", "reads_total_reward"):
            value = any(getattr(estimator, need) for estimator in self.estimators.values())
            object.__setattr__(self, need, value)  # declared by class attributes otherwise

    @override
    def __call__(self, inputs: AdvantageInputs, ranks: DataRanks = ONE_RANK) -> tuple[Tensor, Tensor]:
        advantages, returns = (torch.zeros_like(inputs.token_rewards) for _ in range(2))
        for name, estimator in self.estimators.items():
            rows = torch.zeros_like(inputs.group, dtype=torch.bool)
            if inputs.source is not None and name in self.numbers:
                rows = inputs.source == self.numbers[name]
            if ranks.sum(rows.sum()):  # on every rank or on none
                advantages[rows], returns[rows] = estimator(inputs.of_rows(rows), ranks)
        return advantages, returns
