"""A reward for mathematical answers, compared by math-verify in worker processes."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.extras.rewards.math_worker import initialize, is_equal
from lightning_rlhf.extras.rewards.text import boxed
from lightning_rlhf.ranges import check_ranges
from lightning_rlhf.rewards.signs import plain_signs

_QUICK_S = 0.05  # limit of the first pass, the time of about 30 ordinary comparisons; slower pairs are repeated
_KILL_FACTOR = 4  # a worker is killed after this multiple of its processor time limit in wall-clock time
_KILL_S = 1.0  # added to that time
_START_S = 300.0
_POLL_S = 1.0
_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|[-+]?\.[0-9]+")
# A sign before a number that nothing precedes, which math-verify would read as a sum.
_PLUS = re.compile(r"(?:(?:^|(?<=[=:,(\[{$]))\s*|(?<=\bis)\s+)\+(?=\.?[0-9])")
# Text after a number that is the whole answer. Anything else continues a formula: 1/2, 3x + 1, 1, 2, 3 or 4, 2 pi.
_AFTER_NUMBER = re.compile(
    r"""
    [.,;:!]?\s*$                           # nothing, or the end of a sentence
    | \s*%                                 # percent
    | [.,;:!]?\s+\(?                       # words, such as a unit, but none that continue a formula
      (?!(?:or|and|to|by|plus|minus|times|over|divided|pi|sqrt|squared|cubed|half|halves|thirds|quarters
         |dozen|hundred|thousand|million|billion|trillion)\b)
      [^\W\d_]{2,}
    | \s*[\u3040-\u30ff\u4e00-\u9fff]      # a unit in Japanese or Chinese, which needs no space
    """,
    re.VERBOSE,
)
Pair = tuple[str, str]  # correct answer and response


@dataclass(eq=False)
class MathReward:
    """Rewards with 1 if math-verify finds the answer mathematically equal to the correct one, else with ``wrong``.

    Responses may be hostile. For example, evaluating ``9^{9^{9^9}}`` never ends. Formulas are therefore parsed and
    compared in worker processes with little memory, no environment variables and no writable files. A comparison that
    exceeds its limit is interrupted. If a process cannot be interrupted, it is killed and replaced. Slow comparisons do
    not delay quick ones, and waiting for other responses does not count towards the limit. In wall-clock time, n
    responses take at most about (n / workers) (4 timeout_s + 2) seconds, in two passes, each killed after four times
    its limit and 1 s.

    If you use this class in a script, it needs ``if __name__ == "__main__":``, as with all multiprocessing.

    Args:
        timeout_s: limit for one response, seconds of processor time, so that the load of the machine does not matter.
        on_timeout: ``wrong`` treats a response that exceeds the limit as wrong, ``skip`` omits its reward. Their
            fraction is logged as ``given_up``.
        wrong: reward of a wrong answer, 0, or -1 as in "DAPO" (Yu et al. 2025, eq. 7).
        max_chars: most characters to parse. They are the first of a boxed answer, or the last of a response without
            one.
        workers: number of processes.
        memory_mb: address space limit of each process, MiB.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: a limit is not positive.
    """

    timeout_s: float = 2.0
    on_timeout: Literal["wrong", "skip"] = "wrong"
    wrong: float = 0.0
    max_chars: int = 4000
    workers: int = 2
    memory_mb: int = 1024

    per_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackageError("MathReward needs math-verify: pip install 'lightning-rlhf[math]'")
        check_ranges(self, timeout_s="positive", max_chars="positive", workers="positive", memory_mb="positive")
        self._pool: Any = None
        self._finalizer: Any = None  # stops the pool
        self._lock = threading.Lock()

    def __call__(
        self,
        completions: list[str],
        ground_truth: list[Any],
        log_extra: Callable[[str, list[float]], None] | None = None,
    ) -> list[float | None]:
        r"""Score each completion; None where the limit was exceeded and ``on_timeout`` is ``skip``.

        Args:
            completions: responses. The answer of each is the last ``\boxed{...}``, else the text after the last
                ``####``, else the formula or number that math-verify finds.
            ground_truth: correct answers: a formula or a number, in dollar signs, boxed, after ``####``, or plain.
            log_extra: function that logs whether each comparison was given up.

        Raises:
            ValueError: a correct answer cannot be parsed; the data or the column may be wrong.
        """
        pairs = [(gold_text(gold), self._answer(text)) for text, gold in zip(completions, ground_truth, strict=True)]
        rewards = {True: 1.0, False: self.wrong, None: self.wrong if self.on_timeout == "wrong" else None}
        equal = self.compare(pairs)
        if log_extra is not None:
            log_extra("given_up", [float(result is None) for result in equal])
        return [rewards[result] for result in equal]

    def compare(self, pairs: list[Pair]) -> list[bool | None]:
        """Return whether the texts of each pair are mathematically equal; None where the limit was exceeded."""
        equal = self._compare_within(pairs, min(_QUICK_S, self.timeout_s))
        slow = [i for i, result in enumerate(equal) if result is None]
        if slow and self.timeout_s > _QUICK_S:
            repeated = self._compare_within([pairs[i] for i in slow], self.timeout_s)
            for i, result in zip(slow, repeated, strict=True):
                equal[i] = result
        return equal

    def close(self) -> None:
        """Stop the processes; another call starts new ones."""
        with self._lock:
            if self._pool is not None:
                self._finalizer()
                self._pool = None

    def _compare_within(self, pairs: list[Pair], seconds: float) -> list[bool | None]:
        pool = self._running_pool()
        # Pebble's timeout starts when a worker starts the call, so it excludes waiting.
        timeout = _KILL_FACTOR * seconds + _KILL_S
        futures = [pool.schedule(is_equal, (*pair, seconds), timeout=timeout) for pair in pairs]
        try:
            return [_result(pool, future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _running_pool(self) -> Any:
        with self._lock:
            if self._pool is not None and not self._pool.active:  # a process was killed from outside
                self._finalizer()
                self._pool = None
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(
                    self.workers, context=spawn, initializer=initialize, initargs=(self.memory_mb,), max_tasks=10_000
                )
                self._finalizer = weakref.finalize(self, _stop, self._pool)
                first = self._pool.schedule(is_equal, (r"\boxed{1}", "1", _START_S))
                first.result(timeout=_START_S)  # raises here if processes cannot start
            return self._pool

    def _answer(self, text: str) -> str:
        r"""Return the answer of a response in a form that math-verify parses: boxed, or else the whole text."""
        text = plain_signs(text)
        answer = boxed(text)
        if answer is not None:
            return rf"\boxed{{{answer[: self.max_chars]}}}"
        text = _PLUS.sub(" ", text[-self.max_chars :])
        return _boxed_after_hashes(text) or text


def gold_text(gold: Any) -> str:
    r"""Convert a correct answer to a format in which math-verify parses formulas and numbers.

    Raises:
        ValueError: it is neither text nor finite number; math-verify would parse ``None`` as a product of four letters.
    """
    if (
        isinstance(gold, bool)
        or not isinstance(gold, str | int | float)
        or (isinstance(gold, float) and not math.isfinite(gold))
    ):
        raise UsageError(f"MathReward needs a formula or a finite number as ground_truth, got {gold!r}")
    text = plain_signs(str(gold)).strip()
    if (after_hashes := _boxed_after_hashes(text)) is not None:
        return after_hashes
    is_formula = r"\boxed{" in text or (text.startswith(("$", r"\(", r"\[")) and text.endswith(("$", r"\)", r"\]")))
    if is_formula:
        return text
    return rf"\boxed{{{text.removeprefix('$')}}}"


def _boxed_after_hashes(text: str) -> str | None:
    r"""Return the text after the last ``####`` as a boxed formula, without words after a number; None without it."""
    answers: list[str] = _AFTER_HASHES.findall(text)
    if not answers:
        return None
    answer = answers[-1].replace("$", "").strip()
    number = _NUMBER.match(answer)
    if number is not None and _AFTER_NUMBER.match(answer, number.end()):
        answer = number[0]
    return rf"\boxed{{{answer}}}"


def _result(pool: Any, future: Any) -> bool | None:
    while pool.active and not wait([future], _POLL_S).done:
        pass
    if not wait([future], _POLL_S).done:
        raise BrokenProcessPool("a process of MathReward was killed from outside before the call began")
    try:
        equal: bool | None = future.result()
    except (FutureTimeoutError, ProcessExpired):
        return None
    return equal


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join()
