"""Worker processes of reward functions with a time limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from lightning_rlhf.calls.guard import begin_call, prepare_worker
from lightning_rlhf.calls.workers import MOST_REPEATS, WorkerPool, lost_call
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rewards.results import RewardFailure, RewardResult

_MAX_PROCESSES = 8
_functions: dict[str, RewardFunction] = {}  # loaded functions of this worker process, by reference


class RewardWorkers:
    """Worker processes of the reward functions of a run.

    Args:
        functions: reward functions of the run; workers import them when they start.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        references = [
            (function.picklable, function.arguments)
            for function in functions
            if function.runs_in_worker and isinstance(function.picklable, str)
        ]
        # At least two, so that one that waits for its time limit does not hold up all other calls.
        size = max(2, min(_MAX_PROCESSES, os.cpu_count() or 1))
        self._pool = WorkerPool(size, _initialize, references)
        self._answered = False  # whether any worker has answered a call, so that workers can start
        # Arguments of each call, to repeat it; they are freed with its future.
        self._calls: WeakKeyDictionary[Future[RewardResult], tuple[Any, ...]] = WeakKeyDictionary()

    def submit(
        self, function: RewardFunction, columns: Mapping[str, Any], indices: Sequence[int]
    ) -> Future[RewardResult]:
        """Schedule a call; see :meth:`RewardFunction.evaluate`."""
        return self._schedule(function, (function.picklable, function.arguments, dict(columns), list(indices)))

    def result(self, function: RewardFunction, future: Future[RewardResult]) -> RewardResult:
        """Wait for a call and return its result; a timeout or the worker's death is a failure.

        A call whose worker was killed, as the kernel does where memory is short, is repeated once. One whose pool broke
        is repeated ``MOST_REPEATS`` times; only once if no worker has answered yet, because then none can start at all.

        Args:
            function: function of the call.
            future: future of the call.
        """
        after_kill, after_loss = 1, MOST_REPEATS  # repeats that are left
        while (error := future.exception()) is not None:
            lost = lost_call(error, function.timeout_s)
            if lost is None:  # of the pool, as for a result that cannot be pickled
                return RewardFailure.from_error(error)
            if lost.kind == "timeout":
                return RewardFailure(lost.message, timed_out=True)
            if lost.kind == "died" or (lost.kind == "killed" and not after_kill):
                return RewardFailure(lost.message)
            if not after_loss or (not self._answered and after_loss < MOST_REPEATS):
                return RewardFailure(f"lost its worker process {MOST_REPEATS + 1 - after_loss} times")
            if lost.kind == "killed":
                after_kill -= 1
            else:
                after_loss -= 1
            future = self._schedule(function, self._calls[future])
        self._answered = True
        return future.result()

    def _schedule(self, function: RewardFunction, call: tuple[Any, ...]) -> Future[RewardResult]:
        future: Future[RewardResult] = self._pool.schedule(_evaluate, *call, timeout_s=function.timeout_s)
        self._calls[future] = call
        return future

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


# -- the following runs in a worker process ------------------------------------------------------------------


def _initialize(references: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Prepare a new worker and import the functions, so that imports do not count as time of the first completion.

    Args:
        references: function references, each with its arguments.
    """
    prepare_worker()
    for function, arguments in references:
        with contextlib.suppress(ValueError):  # raised again by the first call
            _load(function, arguments)


def _evaluate(
    function: Callable[..., Any] | str, arguments: dict[str, Any], columns: Mapping[str, Any], indices: Sequence[int]
) -> RewardResult:
    """Evaluate a function in this worker; the result contains only plain data.

    Args:
        function: reference, or the unpickled function.
        arguments: keyword arguments of each call, or of the class.
        columns: lists with one entry for each completion.
        indices: positions of the completions in the rollout.
    """
    begin_call()
    result = _load(function, arguments).evaluate(columns, indices)
    return result.with_text_traceback() if isinstance(result, RewardFailure) else result


def _load(function: Callable[..., Any] | str, arguments: dict[str, Any]) -> RewardFunction:
    if not isinstance(function, str):
        return RewardFunction(function, arguments=arguments)
    key = f"{function} {arguments!r}"
    if key not in _functions:
        _functions[key] = RewardFunction(function, arguments=arguments)
    return _functions[key]
