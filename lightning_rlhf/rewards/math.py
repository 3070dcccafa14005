"""Mathematical answers compared by math-verify, in processes that can be ended."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as OutOfTimeError
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.rewards.math_worker import prepare, verdict
from lightning_rlhf.rewards.text import boxed

_QUICK_S = 0.05  # thirty times what an ordinary pair takes; whoever needs more waits until all others had their turn
_KILL_FACTOR, _KILL_S = 4, 1.0  # a worker is killed when that many times its seconds, and one, have passed by the clock
_START_S = 300.0
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"-?\$?-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+")
Job = tuple[str, str]


class MathReward:
    """1 where the answer equals the right one as mathematics, judged by math-verify, else ``wrong``.

    A response's text is hostile: ``9^{9^{9^9}}`` keeps a computer busy for ever. So formulas are read and compared in
    processes of their own, with little memory, no environment and no files to write to. One that takes too long is
    interrupted; if it does not end then, its process is killed and replaced. Those that are quick come first, and every
    one is judged: its time begins when a process takes it up, however many others it had to wait for. So n responses
    take at most n / workers times a response's limit by the clock, which is its processor time four times and two
    seconds. A script that uses this class needs ``if __name__ == "__main__":``, as all that start processes do.

    Args:
        timeout_s: for one response, seconds of processor time, so that a busy machine changes no verdict.
        on_timeout: a response that was given up is ``wrong``, or ``skip``: the reward does not apply to it. Their share
            is logged as ``given_up``.
        wrong: what a wrong answer earns; 0, or -1 as in "DAPO" (Yu et al. 2025, eq. 7).
        max_chars: of a boxed answer its beginning is read, of a response without one its end.
        workers: processes.
        memory_mb: largest address space of one of them, MiB.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: a limit that is not positive.
    """

    per_sample = True

    def __init__(
        self,
        timeout_s: float = 2.0,
        on_timeout: Literal["wrong", "skip"] = "wrong",
        wrong: float = 0.0,
        max_chars: int = 4000,
        workers: int = 2,
        memory_mb: int = 1024,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathReward needs math-verify: pip install 'lightning-rlhf[math]'")
        limits = {"timeout_s": timeout_s, "max_chars": max_chars, "workers": workers, "memory_mb": memory_mb}
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.timeout_s, self.on_timeout, self.wrong = timeout_s, on_timeout, wrong
        self.max_chars, self.workers, self.memory_mb = max_chars, workers, memory_mb
        self._pool: Any = None
        self._lock = threading.Lock()

    def __call__(
        self,
        completions: list[str],
        ground_truth: list[Any],
        log_extra: Callable[[str, list[float]], None] | None = None,
    ) -> list[float | None]:
        r"""One number per completion, None where it was given up and ``on_timeout`` says skip.

        Args:
            completions: the responses. Of each counts the last ``\boxed{...}``, without one what follows the last
                ``####``, without that the formula or number that math-verify finds.
            ground_truth: the right answers: a formula or a number, in dollar signs, boxed, behind ``####``, or plain.
            log_extra: is told which were given up.

        Raises:
            ValueError: a right answer that cannot be read: the data is another, or the column the wrong one.
        """
        jobs = [(gold_text(gold), self._read(text)) for text, gold in zip(completions, ground_truth, strict=True)]
        given_up = self.wrong if self.on_timeout == "wrong" else None
        earned = {True: 1.0, False: self.wrong, None: given_up}
        found = self.verdicts(jobs)
        if log_extra is not None:
            log_extra("given_up", [float(one is None) for one in found])
        return [earned[one] for one in found]

    def verdicts(self, jobs: list[Job]) -> list[bool | None]:
        """Whether the second text of each pair equals the first; None where it was given up."""
        found = self._pass(jobs, min(_QUICK_S, self.timeout_s))
        slow = [i for i, verdict in enumerate(found) if verdict is None]
        if slow and self.timeout_s > _QUICK_S:
            for i, again in zip(slow, self._pass([jobs[i] for i in slow], self.timeout_s), strict=True):
                found[i] = again
        return found

    def close(self) -> None:
        """End the processes; another call starts new ones."""
        with self._lock:
            if self._pool is not None:
                self._finalizer()
                self._pool = None

    def _pass(self, jobs: list[Job], seconds: float) -> list[bool | None]:
        pool = self._running_pool()
        # Pebble's time runs from when a worker begins, so waiting for others is not a response's own.
        futures = [pool.schedule(verdict, (*job, seconds), timeout=_KILL_FACTOR * seconds + _KILL_S) for job in jobs]
        try:
            return [_result(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _running_pool(self) -> Any:
        with self._lock:
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(
                    self.workers, context=spawn, initializer=prepare, initargs=(self.memory_mb,), max_tasks=10_000
                )
                self._finalizer = weakref.finalize(self, _end, self._pool)
                first = self._pool.schedule(verdict, (r"\boxed{1}", "1", _START_S))
                first.result(timeout=_START_S)  # starting a process is no time of a response
            return self._pool

    def _read(self, text: str) -> str:
        r"""The part of a response that math-verify gets."""
        answer = boxed(text)
        if answer is not None:
            return rf"\boxed{{{answer[: self.max_chars]}}}"
        text = text[-self.max_chars :]
        marked = _MARKED.findall(text)
        return _marked(marked[-1]) if marked else text


def gold_text(gold: Any) -> str:
    r"""A right answer in the form in which math-verify reads formulas and numbers alike.

    Raises:
        ValueError: neither text nor number; math-verify would read ``None`` as a product of four letters.
    """
    if not isinstance(gold, str | int | float) or isinstance(gold, bool):
        raise ValueError(f"MathReward needs a formula or a number as ground_truth, got {gold!r}")
    text = str(gold).strip()
    marked = _MARKED.findall(text)
    if marked:
        return _marked(marked[-1])
    is_formula = r"\boxed{" in text or (text.startswith(("$", r"\(", r"\[")) and text.endswith(("$", r"\)", r"\]")))
    return text if is_formula else rf"\boxed{{{text.removeprefix('$')}}}"


def _marked(text: str) -> str:
    r"""What follows ``####``: its number, without what is said about it, or a formula."""
    number = _NUMBER.match(text)
    whole = text if number is None or "\\" in text else number[0]
    return rf"\boxed{{{whole.replace('$', '')}}}"


def _result(future: Any) -> bool | None:
    try:
        found: bool | None = future.result()
    except (OutOfTimeError, ProcessExpired):
        return None
    return found


def _end(pool: Any) -> None:
    pool.stop()
    pool.join()
