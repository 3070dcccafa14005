"""Users' reward functions: how they are called, and what is said when they misbehave."""

from __future__ import annotations

import difflib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_rlhf.metric_names import TAKEN

GIVEN = ("prompts", "completions", "completion_ids", "finished")


@dataclass(frozen=True)
class RewardFunction:
    """A function that judges completions, called once per rollout.

    It is called by keyword with those of ``prompts`` and ``completions`` (lists of text), ``completion_ids`` (lists of
    token ids), ``finished`` (list of bool, False where the length limit cut the response) and the data's columns that
    it names, one value per completion each. It returns one number per completion, or None where it does not apply.

    Args:
        function: in YAML by its dotted path.
        weight: of its reward in the sum; 0 only logs it.
        name: under which it is logged; None takes the function's own.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        """The name under which it is logged."""
        return self.name or str(getattr(self.function, "__name__", type(self.function).__name__))

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that needs what is not there, before anything is generated.

        Args:
            columns: of the data.

        Raises:
            ValueError: a parameter without default is neither given nor a column.
        """
        available = [*GIVEN, *columns]
        for parameter in inspect.signature(self.function).parameters.values():
            positional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if positional or parameter.default is not parameter.empty or parameter.name in available:
                continue
            near = difflib.get_close_matches(parameter.name, available, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"reward function {self.label!r} needs {parameter.name!r}, but a rollout offers only {available}{hint}"
            )

    def __call__(self, **offered: list[Any]) -> Tensor:
        """The reward of each completion.

        Args:
            **offered: lists of equal length.

        Returns:
            (B,) float32, NaN where the function does not apply.

        Raises:
            RuntimeError: the function raised, or returned something else than one number or None per completion.
        """
        parameters = inspect.signature(self.function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {parameter.name for parameter in parameters}
        try:
            values = self.function(**{key: value for key, value in offered.items() if takes_all or key in named})
        except Exception as error:
            raise RuntimeError(f"reward function {self.label!r} raised {type(error).__name__}: {error}") from error
        return self._checked(values, len(offered["completions"]))

    def _checked(self, values: Any, expected: int) -> Tensor:
        if isinstance(values, Tensor | numpy.ndarray):
            values = values.tolist()
        if not isinstance(values, list | tuple) or len(values) != expected:
            found = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise RuntimeError(
                f"reward function {self.label!r} returned {found}, expected {expected}: one per completion"
            )
        for number, value in enumerate(values):
            if value is not None and (not isinstance(value, Real) or not math.isfinite(value)):
                raise RuntimeError(
                    f"reward function {self.label!r} returned {value!r} for completion {number}, "
                    f"expected a finite number, or None where it does not apply"
                )
        return torch.tensor([math.nan if value is None else float(value) for value in values])


def check_rewards(rewards: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """Refuse reward functions that cannot work together on this data, before anything is generated.

    Args:
        rewards: all of a run.
        columns: of the data.

    Raises:
        ValueError: two share a name or one has that of a metric, one needs what is not there, or a column would hide
            what a rollout gives.
    """
    columns = list(columns)
    twice = [label for label, count in Counter(reward.label for reward in rewards).items() if count > 1]
    if twice:
        raise ValueError(f"two reward functions are both called {twice[0]!r}: give one of them another name")
    taken = [reward.label for reward in rewards if reward.label in TAKEN]
    if taken:
        raise ValueError(f"a reward cannot be called {taken[0]!r}, which is a metric already: give it another name")
    hidden = [column for column in columns if column in GIVEN]
    if rewards and hidden:
        raise ValueError(
            f"the data has a column {hidden[0]!r}, under which reward functions are given what was generated: "
            f"rename it, for example columns: {{my_{hidden[0]}: {hidden[0]}}}"
        )
    for reward in rewards:
        reward.check(columns)
