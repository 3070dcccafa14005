"""How reward functions are called, and what they may answer: ours and TRL's, verl's two, OpenRLHF's.

Nothing here needs torch, so that a worker process starts fast.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from typing import Any

from lightning_rlhf.rewards.resolve import load_function

# What is made for each completion, and so can be no column of the data.
GIVEN = ("prompts", "completions", "completion_ids", "finished")
# What a call has once, and not for each completion.
TOOLS = ("trainer_state", "log_metric", "log_extra")
# Counted by ourselves, as reward_<reward>/...
COUNTED = ("errors", "timeouts", "not_applicable")
_MOST = 3.4028234663852886e38  # float32
_TENSORS = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"))


class WrongAnswer(RuntimeError):
    """A reward function returned what is no reward; the message says what it was.

    Args:
        told: what it was.
        place: of the completion in the rollout, where it was about one.
    """

    def __init__(self, told: str, place: int | None = None) -> None:
        super().__init__(told)
        self.place = place


class EndsTheRun(RuntimeError):
    """Raised by a reward function where no policy for errors may go on, as when a budget is spent."""


@dataclass(frozen=True)
class Convention:
    """One library's way to call a reward function.

    Args:
        sign: the parameter by which it is known; empty for ours, which is TRL's too.
        ours: what its parameters are among ours.
        alone: whether it is called with one completion, and not with lists.
    """

    sign: str = ""
    ours: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


_ONE = {"solution_str": "completions", "ground_truth": "ground_truth", "data_source": "data_source"}
OURS = Convention()
VERL = Convention("solution_str", {**_ONE, "extra_info": "extra_info"}, alone=True)
VERL_BATCH = Convention("solution_strs", {f"{theirs}s": ours for theirs, ours in VERL.ours.items()})
OPENRLHF = Convention("queries", {"queries": "queries", "prompts": "prompts", "labels": "ground_truth"})


@dataclass
class Judged:
    """What a call said.

    Args:
        values: one reward per completion, None where the function does not apply.
        numbers: further numbers, of which the log has means.
    """

    values: list[float | None]
    numbers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """What a reward function may know of the run, under TRL's name ``trainer_state``.

    Args:
        global_step: steps done, which are prompt batches.
        max_steps: of the run, -1 where only epochs limit it.
        epoch: passes over the data done.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


@dataclass(frozen=True)
class Call:
    """A function, and how it wants to be called.

    Args:
        function: whatever can be called.
        arguments: given to it at every call, beside what it names.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any] | str, arguments: Mapping[str, Any]) -> Call:
        """A function as it is or by reference; a class is made an object with the arguments.

        Raises:
            ValueError: the reference names nothing that can be called, or what does not take the arguments.
        """
        found = load_function(function) if isinstance(function, str) else function
        is_class = isinstance(found, type)
        if is_class or arguments:
            signature = inspect.signature(found)
            try:
                (signature.bind if is_class else signature.bind_partial)(**arguments)
            except TypeError as error:
                raise ValueError(f"its arguments do not fit: {error}") from error
        return cls(found(**arguments)) if is_class else cls(found, arguments)

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Of the function, less those that ``arguments`` fill."""
        found = inspect.signature(self.function).parameters.values()
        return [parameter for parameter in found if parameter.name not in self.arguments]

    @cached_property
    def names(self) -> set[str]:
        """Of the parameters."""
        return {parameter.name for parameter in self.parameters}

    @cached_property
    def convention(self) -> Convention:
        """Whose way of calling it follows."""
        return next((one for one in (VERL, VERL_BATCH, OPENRLHF) if one.sign in self.names), OURS)

    @cached_property
    def required(self) -> list[str]:
        """Parameters without default."""
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in self.parameters if p.kind not in stars and p.default is p.empty]

    @cached_property
    def takes_all(self) -> bool:
        """Whether it has ``**kwargs``."""
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters)

    @cached_property
    def is_async(self) -> bool:
        """Whether it must be awaited."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        of_class = type(function).__call__  # of an object
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(of_class)

    def now(self, offered: Mapping[str, Any], places: Sequence[int]) -> Judged:
        """Call it for some completions.

        Args:
            offered: lists with one entry for each of these completions, and ``trainer_state``.
            places: of the completions in the rollout, for messages.

        Raises:
            WrongAnswer: it returned something else than rewards.
        """
        judged = Judged([])
        return self._read(self.function(**self._given(offered, judged)), places, judged)

    async def later(self, offered: Mapping[str, Any], places: Sequence[int]) -> Judged:
        """Await it for some completions; as :meth:`now`."""
        judged = Judged([])
        return self._read(await self.function(**self._given(offered, judged)), places, judged)

    def _given(self, offered: Mapping[str, Any], judged: Judged) -> dict[str, Any]:
        def log_metric(name: str, value: float) -> None:
            _note(judged, name, value)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for value in values:
                _note(judged, column, value)

        given = {"trainer_state": TrainerState(), **offered, "log_metric": log_metric, "log_extra": log_extra}
        count, ours = len(offered["completions"]), self.convention.ours
        if ours:
            texts = zip(given["prompts"], given["completions"], strict=True)
            given["queries"] = [prompt + text for prompt, text in texts] if self.convention is OPENRLHF else []
            given["extra_info"] = [info or {} for info in given.get("extra_info", [None] * count)]  # as verl has it
            given = {theirs: given[name] for theirs, name in ours.items() if name in given}
        if self.convention.alone:
            given = {name: values[0] for name, values in given.items()}
        wanted = {name: value for name, value in given.items() if name in self.names or (self.takes_all and not ours)}
        return {**wanted, **self.arguments}

    def _read(self, answer: Any, places: Sequence[int], judged: Judged) -> Judged:
        answer, count = _plain(answer), len(places)
        if self.convention.alone:
            answer = [answer]
        if isinstance(answer, dict) and "rewards" in answer:
            further = {"scores": answer.get("scores", ()), **answer.get("extra_logs", {})}
            for name, values in further.items():
                plain = _plain(values)
                for value in plain if isinstance(plain, list | tuple) else [plain]:
                    _note(judged, name, value)
            answer = _plain(answer["rewards"])
        if not isinstance(answer, list | tuple) or len(answer) != count:
            found = f"{len(answer)} values" if isinstance(answer, list | tuple) else type(answer).__name__
            raise WrongAnswer(f"returned {found}, expected {count}: one per completion")
        judged.values = [_value(one, place, judged) for one, place in zip(answer, places, strict=True)]
        return judged


def _value(answer: Any, place: int, judged: Judged) -> float | None:
    """The reward that one completion's answer comes to."""
    value = _plain(answer)
    if isinstance(value, dict) and "score" in value:
        for name, number in value.items():
            if name != "score":
                _note(judged, name, number)
        value = _plain(value["score"])
    elif isinstance(value, tuple) and value:
        value = _plain(value[0])
    if value is None:
        return None
    if not isinstance(value, Real) or not _fits(value):
        told = repr(value)
        raise WrongAnswer(
            f"returned {told if len(told) < 100 else told[:100] + '...'} for completion {place}, "
            f"expected a finite number, or None where it does not apply",
            place,
        )
    return float(value)


def _note(judged: Judged, name: str, value: Any) -> None:
    name, value = str(name), _plain(value)
    if name in COUNTED:
        raise WrongAnswer(f"logs a number as {name!r}, which is counted already: give it another name")
    if isinstance(value, Real) and _fits(value):
        judged.numbers.setdefault(name, []).append(float(value))


def _fits(value: Any) -> bool:
    """Whether it is a finite number of float32."""
    return bool(-_MOST <= value <= _MOST)


def _plain(value: Any) -> Any:
    """A tensor or an array as lists and numbers; nothing is imported for it, because what made one has been."""
    for module, kind in _TENSORS:
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], kind)):
            return value.tolist()
    return value
