"""Results of reward functions: reading a returned value as rewards, and describing failures.

This file does not import torch, so that worker processes start fast.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lightning_rlhf.expected_errors import RunError, counted

RESERVED_METRICS = ("errors", "timeouts", "not_applicable")  # counted by the executor as reward_<reward>/...
_FLOAT32_MAX = 3.4028234663852886e38
_ARRAY_TYPES = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"))
_TEXT_INDEXED_BY_NAME = "string indices must be integers"
_OWN_MODULES = (__name__, "lightning_rlhf.rewards.function")


class InvalidRewardError(RunError):
    """A reward function returned a value that is not a reward; the message shows the value.

    Args:
        message: the value, and the allowed values.
        index: position of the completion in the rollout, if the error concerns a single one.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class AbortRun(RunError):
    """Raised by a reward function to end the run regardless of ``on_error``, for example when a budget is spent."""


class WorkerTraceback(Exception):
    """The traceback of an error that was raised in a worker process."""


@dataclass
class RewardOutput:
    """Result of a successful call.

    Args:
        values: one reward per completion, None where the function does not apply.
        metrics: further numbers by name; their means are logged.
        answers: the answer that each completion gives, as text, for majority votes: verl's ``pred``. None without one.
    """

    values: list[float | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    answers: list[str | None] = field(default_factory=list)

    def log(self, name: str, value: Any) -> None:
        """Add a number to a metric; values that are not finite numbers are ignored.

        Raises:
            InvalidRewardError: the name is reserved for a metric that the executor computes.
        """
        name = str(name)
        number = _to_plain(value)
        if name in RESERVED_METRICS:
            raise InvalidRewardError(f"logs a number as {name!r}, which is a built-in metric: use another name")
        if isinstance(number, Real) and _fits_float32(number):
            self.metrics.setdefault(name, []).append(float(number))

    def log_all(self, name: str, values: Iterable[Any]) -> None:
        """Add each number of a sequence to a metric."""
        for value in values:
            self.log(name, value)

    def read(self, returned: Any, indices: Sequence[int]) -> RewardOutput:
        """Fill in rewards and metrics from a function's return value.

        Args:
            returned: a list, tuple or array of rewards, or OpenRLHF's dictionary.
            indices: positions of the completions in the rollout, for messages.

        Raises:
            InvalidRewardError: the value is not one reward per completion.
        """
        returned = _to_plain(returned)
        if isinstance(returned, dict) and "rewards" in returned:
            for name, values in {"scores": returned.get("scores", ()), **returned.get("extra_logs", {})}.items():
                plain = _to_plain(values)
                self.log_all(name, plain if isinstance(plain, list | tuple) else [plain])
            returned = _to_plain(returned["rewards"])
        if not isinstance(returned, list | tuple) or len(returned) != len(indices):
            is_list = isinstance(returned, list | tuple)
            if is_list:
                received = counted(len(returned), "value")
            elif callable(returned):
                received = (
                    f"{type(returned).__name__}, a function: call this factory in a file of yours, and name its result"
                )
            else:
                received = type(returned).__name__
            raise InvalidRewardError(
                f"returned {received}, expected a list of {counted(len(indices), 'number')}: one per completion"
            )
        self.values = [self._read_one(value, index) for value, index in zip(returned, indices, strict=True)]
        self.answers = [_answer_in(value) for value in returned]
        return self

    def _read_one(self, returned: Any, index: int) -> float | None:
        """Return the reward of one completion from a number, or from verl's dictionary or tuple."""
        value = _to_plain(returned)
        if isinstance(value, dict) and "score" in value:
            for name, number in value.items():
                if name != "score":
                    self.log(name, number)
            value = _to_plain(value["score"])
        elif isinstance(value, tuple) and value:
            value = _to_plain(value[0])
        if value is None:
            return None
        if not isinstance(value, Real) or not _fits_float32(value):
            shown = repr(value)
            shown = shown if len(shown) < 100 else shown[:100] + "..."
            raise InvalidRewardError(
                f"returned {shown} for completion {index}, expected a finite number, or None where it does not apply",
                index,
            )
        return float(value)


@dataclass
class RewardFailure:
    """Result of a failed call.

    Args:
        message: description of the failure; follows the function's name in error messages.
        error: the exception, if it was raised in this process.
        trace: the traceback as text, if the error was raised in a worker process.
        timed_out: whether the call exceeded its time limit.
        aborts_run: whether the run ends regardless of ``on_error``.
        index: position in the rollout of the completion that failed; None if unknown.
    """

    message: str
    error: BaseException | None = None
    trace: str = ""
    timed_out: bool = False
    aborts_run: bool = False
    index: int | None = None

    @property
    def cause(self) -> BaseException | None:
        """Exception to set as ``__cause__``."""
        return self.error or (WorkerTraceback(f"\n{self.trace}") if self.trace else None)

    @classmethod
    def from_error(cls, error: BaseException) -> RewardFailure:
        """Describe an exception, and remove this package's frames from the start of its traceback."""
        if isinstance(error, InvalidRewardError):
            return cls(str(error), index=error.index)
        while error.__traceback__ and error.__traceback__.tb_frame.f_globals.get("__name__") in _OWN_MODULES:
            if error.__traceback__.tb_next is None:
                break
            error.__traceback__ = error.__traceback__.tb_next
        message = f"raised {type(error).__name__}: {error}"
        if isinstance(error, TypeError) and _TEXT_INDEXED_BY_NAME in str(error) and _reads_chat_message(error):
            message += "; it seems to expect chat messages: set messages: true of the reward (evaluate: --messages)"
        elif "main thread" in str(error):
            message += "; it must run in a main thread: set timeout_s, which runs it in worker processes"
        return cls(message, error, aborts_run=isinstance(error, AbortRun))

    def with_text_traceback(self) -> RewardFailure:
        """Replace the exception by its traceback as text, which can always be sent to another process."""
        if self.error is None:
            return self
        trace = "".join(traceback.format_exception(self.error))
        return RewardFailure(self.message, trace=trace, aborts_run=self.aborts_run)


RewardResult = RewardOutput | RewardFailure


def _reads_chat_message(error: BaseException) -> bool:
    """Return whether the line that raised an error indexes with a key of chat messages, ``content`` or ``role``."""
    line = traceback.extract_tb(error.__traceback__)[-1:]
    return any(re.search(r"""\[\s*["'](content|role)["']\s*\]""", frame.line or "") for frame in line)


def _answer_in(returned: Any) -> str | None:
    """Return the answer in verl's dictionary as text; None without one, which is not an answer like others."""
    pred = _to_plain(returned.get("pred")) if isinstance(returned, dict) else None
    return None if pred in (None, "") else str(pred)


def _fits_float32(value: Any) -> bool:
    return bool(-_FLOAT32_MAX <= value <= _FLOAT32_MAX)


def _to_plain(value: Any) -> Any:
    """Convert tensors and arrays to lists and numbers, without importing the libraries that define them."""
    for module, name in _ARRAY_TYPES:
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return value.tolist()
    return value
