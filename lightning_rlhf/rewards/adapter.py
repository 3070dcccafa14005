"""Users' reward functions: how they are given, and what is refused before a run."""

from __future__ import annotations

import difflib
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from torch import Tensor

from lightning_rlhf.metric_names import TAKEN
from lightning_rlhf.rewards.conventions import GIVEN, OPENRLHF, OURS, TOOLS, Call


@dataclass(frozen=True)
class RewardFunction:
    """A function that judges completions, and what is done when it fails; docs/rewards.md says how it is called.

    A fault is an exception, an answer that is no reward, or more time than ``timeout_s``.

    Args:
        function: ``file.py:name``, ``module:name``, in YAML also a dotted path, or an object by ``class_path``.
        weight: of its reward in the sum; 0 only logs it.
        name: under which it is logged; None takes the function's own.
        arguments: further arguments at every call; where the function is given as the name of a class, of the class.
        messages: whether prompts and completions are lists of chat messages, as TRL has them, and not text.
        per_sample: whether each completion is judged for itself, as soon as it is there, by several threads at a time.
            None asks the function's own attribute; what has a ``timeout_s`` does too, and verl's one after another.
        timeout_s: for one completion, seconds, positive; the function then works in processes, which can be ended.
            An ``async`` one is cancelled instead. None never ends it.
        on_error: ``raise`` ends the run at a fault, ``skip`` leaves the response out of this reward, ``zero`` gives 0.
        max_error_rate: share of a rollout's completions, in [0, 1]; more faults than that end the run all the same.
        dry_call: whether it is tried on two made-up completions before the run.
    """

    function: str | Callable[..., Any]  # in this order, or a configuration could not be written out again
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    messages: bool = False
    per_sample: bool | None = None
    timeout_s: float | None = None
    on_error: Literal["raise", "skip", "zero"] = "raise"
    max_error_rate: float = 0.5
    dry_call: bool = True

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive or null, got {self.timeout_s}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate must lie in [0, 1], got {self.max_error_rate}")
        if self.timeout_s is not None and self.per_sample is False:
            raise ValueError("timeout_s is for one completion: leave per_sample out, or true")
        try:
            self.call  # noqa: B018 (what cannot be found is said now)
        except ValueError as error:
            raise ValueError(f"reward function {self.function!r}: {error}") from error

    @cached_property
    def call(self) -> Call:
        """The function itself."""
        return Call.of(self.function, self.arguments)

    @property
    def label(self) -> str:
        """The name under which it is logged."""
        function = self.call.function
        return self.name or str(getattr(function, "__name__", type(function).__name__))

    @property
    def alone(self) -> bool:
        """Whether each completion is judged for itself, and as soon as it is there."""
        return self.call.convention.alone or self.timeout_s is not None or self.many_at_a_time

    @property
    def many_at_a_time(self) -> bool:
        """Whether the function says that several threads may call it."""
        said = self.per_sample
        return bool(getattr(self.call.function, "per_sample", False)) if said is None else said

    @property
    def in_process(self) -> bool:
        """Whether the function works in processes that can be ended."""
        return self.timeout_s is not None and not self.call.is_async

    @property
    def may_be_tried(self) -> bool:
        """Whether a call before the run does no harm."""
        return self.dry_call and bool(getattr(self.call.function, "dry_call", True))

    @property
    def portable(self) -> Callable[..., Any] | str:
        """What another process makes the function of: a reference where that is enough."""
        function = self.function
        if inspect.isfunction(function) and function.__qualname__.isidentifier():
            return f"{function.__module__}:{function.__qualname__}"
        return function

    def converted(self, offered: Mapping[str, Any]) -> Mapping[str, Any]:
        """What it is given, as text or as messages.

        Args:
            offered: lists with one entry per completion, among them ``messages``, those of the prompts.
        """
        given = {name: values for name, values in offered.items() if name != "messages"}
        if self.messages and self.call.convention is OURS:
            asked = zip(given["prompts"], offered.get("messages") or [[]] * len(given["prompts"]), strict=True)
            given["prompts"] = [messages or [{"role": "user", "content": text}] for text, messages in asked]
            given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
        return given

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that needs what is not there, before anything is generated.

        Args:
            columns: of the data.

        Raises:
            ValueError: a parameter without default is neither given nor a column, or another process cannot have it.
        """
        convention = self.call.convention
        further = ["queries"] if convention is OPENRLHF else []
        available = [*GIVEN, *columns]
        for parameter in self.call.required:
            needed = convention.ours.get(parameter, parameter)
            if needed in (*available, *further, *TOOLS) or parameter == "extra_info":
                continue
            near = difflib.get_close_matches(needed, available, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if convention.ours:
                hint = f", as the column {needed!r}; name it by columns: {{{needed}: <yours>}}"
            offers = "a rollout offers only" if not convention.ours else "the data has only"
            raise ValueError(f"reward function {self.label!r} needs {parameter!r}, but {offers} {available}{hint}")
        if self.in_process:
            self._check_portable()

    def gaps(self, rows: Sequence[Mapping[str, Any]], name: str, places: Sequence[str]) -> list[str]:
        """Which columns it asks for some rows lack: it may be made for that, or fail in an hour.

        Args:
            rows: their columns.
            name: of the data.
            places: where each row stands.

        Returns:
            A sentence for each column.
        """
        ours, told = self.call.convention.ours, list[str]()
        known = {column for row in rows for column in row}
        for column in sorted(known.intersection(ours.get(own, own) for own in self.call.required)):
            empty = [place for row, place in zip(rows, places, strict=True) if row.get(column) is None]
            if empty:
                told.append(
                    f"{len(empty)} of {len(rows)} rows of the {name} lack {column!r}, which reward {self.label} asks "
                    f"for; the first is {empty[0]}"
                )
        return told

    def _check_portable(self) -> None:
        try:
            ForkingPickler.dumps((self.portable, self.arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward function {self.label!r} has a timeout_s, so it works in processes of its own, and they cannot "
                f"be given it ({error}): define it at the top of a file and give it as file.py:name"
            ) from error

    def close(self) -> None:
        """End what the function holds, such as processes, if it has a ``close`` to say how."""
        close = getattr(self.call.function, "close", None)
        if close is not None:
            close()

    def __call__(self, **offered: list[Any]) -> Tensor:
        """The reward of each completion.

        Args:
            **offered: lists of equal length.

        Returns:
            (B,) float32, NaN where the function does not apply.

        Raises:
            RuntimeError: the function raised, or returned something else than one number or None per completion.
        """
        from lightning_rlhf.rewards.dispatch import Jury
        from lightning_rlhf.rewards.scoring import Scoring

        with Jury([self]) as jury:
            return Scoring(jury).finish(offered).rewards[self.label]


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
    if folder := [reward.label for reward in rewards if "/" in reward.label]:
        raise ValueError(f"a reward cannot be called {folder[0]!r}: loggers that write files take '/' for a folder")
    taken = [reward.label for reward in rewards if reward.label in TAKEN]
    if taken:
        raise ValueError(f"a reward cannot be called {taken[0]!r}, which is a metric already: give it another name")
    hidden = [column for column in columns if column in (*GIVEN, *TOOLS)]
    if rewards and hidden:
        raise ValueError(
            f"the data has a column {hidden[0]!r}, under which reward functions are given what was generated: "
            f"rename it, for example columns: {{my_{hidden[0]}: {hidden[0]}}}"
        )
    for reward in rewards:
        reward.check(columns)
