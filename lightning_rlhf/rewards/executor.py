"""Execution of reward functions in the calling thread, other threads, worker processes or an event loop."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.calls.loop import GRACE_S, EventLoopThread
from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.calls.workers import timeout_message
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.processes.waiting import wait_logged
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rewards.results import AbortRun, RewardFailure, RewardOutput, RewardResult
from lightning_rlhf.rewards.workers import RewardWorkers

_THREADS = 16
_SHOWN_CHARACTERS = 80  # longest column value in a message
MetricSums = dict[str, tuple[float, float]]  # by metric name: the sum and the number of its terms
Calls = dict[tuple[str, int], Future[RewardResult]]  # calls for single completions, by reward name and index


@dataclass(frozen=True)
class RolloutRewards:
    """Rewards of a rollout.

    Args:
        rewards: (B,) rewards by name, NaN where a function does not apply or failed.
        metrics: metrics of the reward functions.
        unknown: (B,) bool, True where a function with a weight failed and ``on_error`` is ``skip``.
        answers: answer that each completion gives, by the name of the function that found it; None without an answer.
    """

    rewards: dict[str, Tensor]
    metrics: MetricSums
    unknown: Tensor
    answers: dict[str, list[str | None]] = field(default_factory=dict)


class RewardExecutor:
    """Runs the reward functions of a run; owns their threads, worker processes and event loop.

    Threads and processes start when they are needed. The executor can be used again after :meth:`close`.

    Args:
        functions: reward functions with different names.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.functions = list(functions)
        self._working_directory = os.getcwd()
        self._workers = RewardWorkers(self.functions)
        self._threads = DaemonThreads(_THREADS, "rewards")
        self._single_thread = DaemonThreads(1, "rewards one by one")
        self._loop = EventLoopThread("async rewards")

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_streaming(self) -> bool:
        """Whether any function scores completions before the rollout is complete."""
        return any(function.scores_singly for function in self.functions)

    @property
    def overlaps(self) -> bool:
        """Whether any function runs outside of the calling thread, which can compute something else meanwhile."""
        return any(function.scores_singly or function.is_async for function in self.functions)

    def launch(self, index: int, row: Mapping[str, list[Any]], state: TrainerState | None = None) -> Calls:
        """Start scoring one finished completion while others are still generated.

        Args:
            index: position of the completion in the rollout.
            row: columns of the completion, lists of one entry.
            state: progress of the run.

        Returns:
            The calls, to be passed to :meth:`score`.
        """
        singly = [function for function in self.functions if function.scores_singly]
        return {(function.label, index): self.submit(function, row, [index], state) for function in singly}

    def score(
        self, columns: Mapping[str, list[Any]], state: TrainerState | None = None, started: Calls | None = None
    ) -> RolloutRewards:
        """Score the completions of a rollout.

        Args:
            columns: lists with one entry per completion.
            state: progress of the run.
            started: calls that :meth:`launch` returned, which are not repeated.

        Raises:
            RuntimeError: a function failed and its ``on_error`` is ``raise``, or it failed too often.
            AbortRun: a function raised it.
        """
        return self.launch_rest(columns, state, started)()

    def launch_rest(
        self, columns: Mapping[str, list[Any]], state: TrainerState | None = None, started: Calls | None = None
    ) -> Callable[[], RolloutRewards]:
        """Start all calls; arguments as of :meth:`score`. Functions of this thread run at once.

        Returns:
            Function that waits for the calls and returns the rewards, or raises as :meth:`score` does.
        """
        # Functions that run in this thread are called last, because they block it while other calls could already run.
        ordered = sorted(self.functions, key=lambda function: not function.scores_singly and not function.is_async)
        calls = {function.label: self._calls(function, columns, state, started or {}) for function in ordered}
        return lambda: self._rewards(columns, calls)

    def _rewards(
        self, columns: Mapping[str, list[Any]], calls: Mapping[str, Sequence[Future[RewardResult]]]
    ) -> RolloutRewards:
        """Wait for the calls of all functions; return their rewards and metrics."""
        rewards: dict[str, Tensor] = {}
        answers: dict[str, list[str | None]] = {}
        metrics: MetricSums = {}
        count = len(columns["completions"])
        unknown = torch.zeros(count, dtype=torch.bool)
        for function in self.functions:
            results = self.results(function, calls[function.label])
            _raise_if_fatal(function, results, columns)
            rewards[function.label] = _reward_tensor(function, results, count)
            nothing = [None] * _rows_per_call(function, count)
            answers[function.label] = [each for result in results for each in getattr(result, "answers", nothing)]
            metrics |= _metric_sums(function, results, count)
            if function.on_error == "skip" and function.weight:
                failed = torch.tensor([isinstance(result, RewardFailure) for result in results])
                unknown |= failed.repeat_interleave(_rows_per_call(function, count))
        return RolloutRewards(rewards, metrics, unknown, answers)

    def dry_run(self, columns: Mapping[str, list[Any]]) -> None:
        """Call every function that supports dry runs on made-up completions, before the run.

        Args:
            columns: lists with one entry per completion.

        Raises:
            ValueError: a function fails.
        """
        for function in self.functions:
            if not function.supports_dry_run:
                continue
            for result in self.results(function, self._calls(function, columns, None, {})):
                if isinstance(result, RewardFailure):
                    raise UsageError(
                        f"reward function {function.label!r} {result.message}; it was called before the run on a "
                        f"completion that repeats the prompt, and on an empty one (dry_call: false disables this)"
                    ) from result.cause

    def _calls(
        self,
        function: RewardFunction,
        columns: Mapping[str, list[Any]],
        state: TrainerState | None,
        started: Calls,
    ) -> list[Future[RewardResult]]:
        """Return all calls of a function in order, starting those that are missing."""
        count = len(columns["completions"])
        if not function.scores_singly:
            return [self.submit(function, columns, range(count), state)]
        calls = []
        for index in range(count):
            row = {name: values[index : index + 1] for name, values in columns.items()}
            calls.append(started.get((function.label, index)) or self.submit(function, row, [index], state))
        return calls

    def submit(
        self,
        function: RewardFunction,
        columns: Mapping[str, Any],
        indices: Sequence[int],
        state: TrainerState | None = None,
    ) -> Future[RewardResult]:
        """Start a call in the function's thread, worker process or event loop.

        Args:
            function: one of the executor's functions.
            columns: lists with one entry for each of these completions.
            indices: positions of the completions in the rollout.
            state: progress of the run.
        """
        columns = {**function.with_messages(columns), "trainer_state": state or TrainerState()}
        if function.runs_in_worker:
            return self._workers.submit(function, columns, indices)
        if function.is_async:
            return self._loop.submit(_evaluate_within_limit(function, columns, indices))
        if function.scores_singly:
            threads = self._threads if function.thread_safe else self._single_thread
            return threads.submit(function.evaluate, columns, indices)
        done = Future[RewardResult]()
        done.set_result(function.evaluate(columns, indices))
        return done

    def results(self, function: RewardFunction, calls: Sequence[Future[RewardResult]]) -> list[RewardResult]:
        """Wait for calls and return their results in order; log the number of pending calls every minute."""
        limit = math.inf
        if function.is_async and function.timeout_s is not None:
            limit = function.timeout_s + GRACE_S
        if wait_logged(calls, f"calls of reward {function.label}", seconds=limit):
            self._loop.close(timeout_s=0)
        results = [self._result(function, call) for call in calls]
        directory = os.getcwd()
        if results and directory != self._working_directory:
            os.chdir(self._working_directory)
            results[0] = RewardFailure(
                f"changed the working directory to {directory}, which breaks the run's relative paths; it was reset to "
                f"{self._working_directory}. Use absolute paths instead of os.chdir"
            )
        return results

    def _result(self, function: RewardFunction, call: Future[RewardResult]) -> RewardResult:
        if not call.done():
            call.cancel()
            return _timeout_failure(function)
        if function.runs_in_worker:
            return self._workers.result(function, call)
        error = call.exception()
        return call.result() if error is None else RewardFailure.from_error(error)

    def close(self) -> None:
        """Stop threads, worker processes and event loop."""
        self._workers.close()
        self._threads.close()
        self._single_thread.close()
        self._loop.close()


def compute_reward(function: RewardFunction, /, **columns: list[Any]) -> Tensor:
    """Score completions with a single function, outside a run.

    Args:
        function: the reward function.
        **columns: lists with one entry per completion.

    Returns:
        (B,) float32, NaN where the function does not apply.

    Raises:
        RuntimeError: the function failed; see :meth:`RewardExecutor.score`.
    """
    with RewardExecutor([function]) as executor:
        return executor.score(columns).rewards[function.label]


async def _evaluate_within_limit(
    function: RewardFunction, columns: Mapping[str, Any], indices: Sequence[int]
) -> RewardResult:
    """Await an ``async`` function and cancel it at its time limit."""
    call = asyncio.ensure_future(function.evaluate_async(columns, indices))
    done, _ = await asyncio.wait([call], timeout=function.timeout_s)
    if not done:
        call.cancel()
        return _timeout_failure(function)
    return RewardFailure("cancelled itself") if call.cancelled() else call.result()


def _timeout_failure(function: RewardFunction) -> RewardFailure:
    return RewardFailure(timeout_message(function.timeout_s or 0), timed_out=True)


def _rows_per_call(function: RewardFunction, count: int) -> int:
    return 1 if function.scores_singly else count


def _raise_if_fatal(
    function: RewardFunction, results: Sequence[RewardResult], columns: Mapping[str, list[Any]]
) -> None:
    """Raise an error if a failure ends the run: AbortRun, ``on_error: raise``, or more failures than allowed."""
    count = len(columns["completions"])
    failures = {i: result for i, result in enumerate(results) if isinstance(result, RewardFailure)}
    advice = ""
    if not function.scores_singly and count > 1:
        advice = (
            f"; one call scored all {count} completions, so all of them fail: set per_sample: true to call the "
            f"function once per completion"
        )
    for i, failure in failures.items():
        if failure.aborts_run:
            raise AbortRun(f"reward function {function.label!r} {failure.message}") from failure.cause
        if function.on_error == "raise":
            reference = "..."
            if isinstance(function.function, str):
                reference = function.function
            raise RunError(
                f"reward function {function.label!r} {failure.message} ({_describe_row(function, failure, i, columns)})"
                f"; to continue after a failure, set {{function: {reference}, on_error: skip}} under rewards, which "
                f"leaves out the response, or on_error: zero, which sets the reward to 0{advice}"
            ) from failure.cause
    failed = len(failures) * _rows_per_call(function, count)
    if failed > function.max_error_rate * count:
        i, first = next(iter(failures.items()))
        raise RunError(
            f"reward function {function.label!r} failed for {failed} of {count} completions, more than its "
            f"max_error_rate of {function.max_error_rate:g} allows; first failure: it {first.message} "
            f"({_describe_row(function, first, i, columns)}){advice}"
        ) from first.cause


def _describe_row(function: RewardFunction, failure: RewardFailure, call: int, columns: Mapping[str, list[Any]]) -> str:
    """Describe the completion of a failed call, if it is known, with its data source and prompt."""
    count = len(columns["completions"])
    index = call if function.scores_singly or count == 1 else failure.index
    if index is None:
        return f"one call scored all {count} completions, so the failing one is unknown"
    shown = [("data_source", "data_source"), ("prompts", "prompt")]
    row = [f"{name} {str(columns[column][index])[:_SHOWN_CHARACTERS]!r}" for column, name in shown if column in columns]
    return ", ".join([f"completion {index} of {count}, counted from 0", *row])


def _reward_tensor(function: RewardFunction, results: Sequence[RewardResult], count: int) -> Tensor:
    failed = [math.nan if function.on_error == "skip" else 0.0] * _rows_per_call(function, count)
    values: list[float | None] = []
    for result in results:
        values += result.values if isinstance(result, RewardOutput) else failed
    return torch.tensor([math.nan if value is None else value for value in values])


def _metric_sums(function: RewardFunction, results: Sequence[RewardResult], count: int) -> MetricSums:
    outputs = [result for result in results if isinstance(result, RewardOutput)]
    failures = [result for result in results if isinstance(result, RewardFailure)]
    timeouts = sum(failure.timed_out for failure in failures)
    counts = {"not_applicable": sum(output.values.count(None) for output in outputs)}
    if function.on_error != "raise":
        counts["errors"] = (len(failures) - timeouts) * _rows_per_call(function, count)
        counts["timeouts"] = timeouts * _rows_per_call(function, count)
    sums = {name: (float(number), float(count)) for name, number in counts.items()}
    logged: dict[str, list[float]] = {}
    for output in outputs:
        for name, values in output.metrics.items():
            logged.setdefault(name, []).extend(values)
    sums |= {name: (sum(values), float(len(values))) for name, values in logged.items()}
    return {f"reward_{function.label}/{name}": value for name, value in sums.items()}
