"""Learning-rate schedules over the length of the run, by ratios instead of numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_rlhf.expected_errors import UsageError

Kind = Literal[
    "cosine", "cosine_with_min_lr", "cosine_with_restarts", "linear", "polynomial", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip


class RunSchedule(LambdaLR):
    """One of transformers' schedules, stretched over the run: linear warm-up from zero, then the decay of its kind.

    The module gives the schedule the length of the run, so that a configuration needs no numbers of steps. The formulas
    are those of ``transformers.get_scheduler``.

    Args:
        optimizer: its learning rates are multiplied by the schedule's factor.
        kind: name of a schedule of transformers.
        warmup_ratio: fraction of the run's steps in which the rate rises linearly from zero, in [0, 1).
        arguments: further arguments of that schedule, for example ``{min_lr_rate: 0.1}`` of ``cosine_with_min_lr``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: Kind = "cosine",
        warmup_ratio: float = 0.0,
        arguments: dict[str, float] | None = None,
    ) -> None:
        if not 0.0 <= warmup_ratio < 1.0:
            raise UsageError(f"warmup_ratio must lie in [0, 1), got {warmup_ratio}")
        self.kind = kind
        self.warmup_ratio = warmup_ratio
        self.arguments = dict(arguments or {})
        self.steps = 0
        super().__init__(optimizer, _before_stretch)

    def stretch(self, steps: int | float) -> None:
        """Lay the schedule over a run, and set the rate of its first step.

        Args:
            steps: training steps of the run, at least 1.

        Raises:
            ValueError: the number is not known, or the schedule refuses its arguments.
        """
        if not math.isfinite(steps) or steps < 1:
            raise UsageError(f"RunSchedule needs the length of the run, which is {steps} steps: give trainer.max_steps")
        self.steps = int(steps)
        self._make_factors()
        for group, factor in zip(self.optimizer.param_groups, self.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(0)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load position, kind and ratios; the length stays that of this run."""
        steps = self.steps
        super().load_state_dict(state_dict)
        self.steps = steps
        if steps:
            self._make_factors()

    def _make_factors(self) -> None:
        warmup = math.ceil(self.warmup_ratio * self.steps)
        self.lr_lambdas = [
            _factor(self.kind, float(group["initial_lr"]), warmup, self.steps, self.arguments)
            for group in self.optimizer.param_groups
        ]


def _before_stretch(step: int) -> float:
    if step:
        raise UsageError("RunSchedule was not given the length of the run: call stretch(steps) before training")
    return 1.0


def _factor(kind: str, rate: float, warmup: int, steps: int, arguments: dict[str, float]) -> Callable[[int], float]:
    """Return transformers' factor of the learning rate as a function of the step."""
    from transformers import get_scheduler

    stand_in = torch.optim.SGD([torch.zeros(1)], lr=rate)  # a schedule is made for an optimizer, and changes it
    try:
        schedule: Any = get_scheduler(kind, stand_in, warmup, steps, scheduler_specific_kwargs=dict(arguments))
    except TypeError as error:
        raise UsageError(f"the schedule {kind!r} does not take the arguments {arguments}: {error}") from None
    factor: Callable[[int], float] = schedule.lr_lambdas[0]
    return factor
