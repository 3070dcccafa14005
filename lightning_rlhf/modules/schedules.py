"""Learning-rate schedules over the length of the run, by ratios instead of numbers of steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_range

Kind = Literal[
    "cosine", "cosine_with_min_lr", "cosine_with_restarts", "linear", "polynomial", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip


class RunSchedule(LambdaLR):
    """One of transformers' schedules, stretched over the run: linear warm-up from zero, then the decay you choose.

    The module passes the length of the run to the schedule, so your configuration needs no numbers of steps. The
    formulas are the ones of ``transformers.get_scheduler``. Torch's schedulers work too, but you give them numbers of
    steps.

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
        check_range("warmup_ratio", warmup_ratio, "in [0, 1)")
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


# Names in the state of a schedule that belong to the length of a run, which a resumed run may change.
_LENGTHS = ("total_steps", "_schedule_phases")


def make_schedule(make: Any, optimizer: Optimizer, count_steps: Callable[[], float], role: str) -> LRScheduler:
    """Return the schedule of a role for the length of a run.

    Args:
        make: factory of the schedule; one without ``total_steps`` that needs them has those of the run.
        optimizer: optimizer of the role.
        count_steps: function that returns the training steps of the run, infinite if unknown.
        role: name of the role, for messages.

    Raises:
        UsageError: the result is not a schedule of steps, or it ends before the run.
    """
    if _lacks_total_steps(make):
        steps = count_steps()
        if not math.isfinite(steps):
            raise UsageError(f"the {role}'s schedule needs the length of the run: set its total_steps, or max_steps")
        schedule = make(optimizer, total_steps=int(steps) + 1)  # the last step sets a rate, too, which is not used
    else:
        try:
            schedule = make(optimizer)
        except ValueError as error:
            raise UsageError(f"the {role}'s schedule cannot be made: {error}") from error
    if isinstance(schedule, ReduceLROnPlateau):
        raise UsageError(
            f"the {role}'s schedule is ReduceLROnPlateau, which waits for a metric, but schedules advance at every "
            f"training step: use lightning_rlhf.modules.schedules.RunSchedule or a schedule of torch without a metric"
        )
    if not isinstance(schedule, LRScheduler):
        raise UsageError(f"the {role}'s schedule must be an LRScheduler of torch, got {schedule!r}")
    if isinstance(schedule, RunSchedule):
        schedule.stretch(count_steps())
    for part, before in _one_cycles(schedule):
        if part.total_steps < (steps := count_steps() - before) < math.inf:
            raise UsageError(
                f"the {role}'s {type(part).__name__} ends after its total_steps of {part.total_steps}, but the run has "
                f"{int(steps)} steps: remove total_steps, epochs and steps_per_epoch to take them from the run, or set "
                f"total_steps to {int(steps) + 1}"
            )
    return schedule


def _one_cycles(schedule: Any, before: int = 0) -> Iterator[tuple[OneCycleLR, int]]:
    """Yield the schedules that raise after their last step, with the number of the run's steps before they begin."""
    if isinstance(schedule, OneCycleLR):
        yield schedule, before
    milestones = getattr(schedule, "_milestones", [])
    parts = getattr(schedule, "_schedulers", [])
    if isinstance(schedule, SequentialLR):
        if isinstance(parts[-1], OneCycleLR):  # only the last part lasts until the end
            yield parts[-1], milestones[-1]
    else:
        for part in parts:
            yield from _one_cycles(part, before)


def without_lengths(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a schedule without its length: that of the configuration counts in a resumed run."""
    return {name: value for name, value in state.items() if name not in _LENGTHS}


def _lacks_total_steps(make: Any) -> bool:
    """Return whether a factory makes a OneCycleLR without its length."""
    if not isinstance(make, functools.partial):
        return make is OneCycleLR
    kinds = [part for part in (make.func, *make.args) if isinstance(part, type)]
    lengths = [make.keywords.get(name) for name in ("total_steps", "epochs", "steps_per_epoch")]
    return any(issubclass(kind, OneCycleLR) for kind in kinds) and lengths == [None, None, None]


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
