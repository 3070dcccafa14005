"""Who judges where: in this thread, in others, in processes that can be ended, or in an event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as OutOfTimeError
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from weakref import WeakKeyDictionary

from pebble import ProcessExpired, ProcessPool

from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.rewards.conventions import Judged
from lightning_rlhf.rewards.threads import Threads
from lightning_rlhf.rewards.worker import EXITED, Failure, attempt, attempt_later, prepare, work

log = logging.getLogger(__name__)
_PROCESSES = 8
_THREADS = 16
_SAY_SECONDS = 60
_GRACE_SECONDS = 1.0  # what does not return this long after its time is over blocks the event loop
Said = Judged | Failure


class Jury:
    """The reward functions of a run, and the threads, the processes and the event loop that some of them work in.

    Nothing is started before it is needed. It can be used again after :meth:`close`.

    Args:
        rewards: with different names.
    """

    def __init__(self, rewards: Sequence[RewardFunction]) -> None:
        self.rewards = list(rewards)
        self._directory = os.getcwd()
        self._pool: ProcessPool | None = None
        self._given: WeakKeyDictionary[Future[Said], tuple[Any, ...]] = WeakKeyDictionary()  # to processes
        self._threads: Threads | None = None
        self._one_thread: Threads | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def __enter__(self) -> Jury:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def submit(self, reward: RewardFunction, offered: Mapping[str, Any], places: Sequence[int]) -> Future[Said]:
        """Have a function judge some completions, where it is to work."""
        if reward.in_process:
            return self._in_process(reward, (reward.portable, reward.arguments, dict(offered), list(places)))
        if reward.call.is_async:
            return asyncio.run_coroutine_threadsafe(_limited(reward, offered, places), self._event_loop())
        if reward.many_at_a_time:
            self._threads = self._threads or Threads(_THREADS, "rewards")
            return self._threads.submit(attempt, reward.call, offered, places)
        if reward.alone:
            self._one_thread = self._one_thread or Threads(1, "rewards one by one")
            return self._one_thread.submit(attempt, reward.call, offered, places)
        done = Future[Said]()
        done.set_result(attempt(reward.call, offered, places))
        return done

    def outcomes(self, reward: RewardFunction, futures: Sequence[Future[Said]]) -> list[Said]:
        """What came of calls, in their order; says every minute how many are missing."""
        began, limit = time.monotonic(), math.inf
        if reward.call.is_async and reward.timeout_s is not None:
            limit = reward.timeout_s + _GRACE_SECONDS
        while missing := wait(futures, min(_SAY_SECONDS, limit)).not_done:
            seconds = time.monotonic() - began
            if seconds >= limit:
                self._loop = None  # its thread is lost; the next calls get another
                break
            counts = len(missing), len(futures)
            log.info("Waiting for %d of %d calls of reward %s for %.0f s.", *counts, reward.label, seconds)
        found = [self._outcome(reward, future) for future in futures]
        now = os.getcwd()
        if found and now != self._directory:
            os.chdir(self._directory)
            found[0] = Failure(
                f"changed the working directory to {now}, where the run's relative paths name other files; it is "
                f"{self._directory} again. Use absolute paths instead of os.chdir"
            )
        return found

    def _outcome(self, reward: RewardFunction, future: Future[Said]) -> Said:
        if not future.done():
            future.cancel()
            return _late(reward)
        error = future.exception()
        if error is None:
            return future.result()
        if not reward.in_process:  # an error of the function's own, whatever its kind
            return Failure.of(error)
        if isinstance(error, OutOfTimeError):
            return _late(reward)
        if isinstance(error, ProcessExpired):
            return Failure(f"ended the process it worked in ({_ending(error.exitcode)})")
        if isinstance(error, BrokenProcessPool):
            return self._alone(reward, future)
        return Failure.of(error)

    def _alone(self, reward: RewardFunction, lost: Future[Said]) -> Said:
        """The outcome of a call whose pool ended with all calls in it, because of this one or of another."""
        future = self._in_process(reward, self._given[lost])
        if isinstance(wait([future]).done.pop().exception(), BrokenProcessPool):
            return Failure("lost the process it worked in, twice")
        return self._outcome(reward, future)

    def close(self) -> None:
        """End everything that works; closing twice is fine."""
        self._drop_pool()
        for threads in (self._threads, self._one_thread):
            if threads is not None:
                threads.close()
        self._threads = self._one_thread = None
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(_GRACE_SECONDS)
            self._loop = self._loop_thread = None

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _in_process(self, reward: RewardFunction, given: tuple[Any, ...]) -> Future[Said]:
        future: Future[Said] = self._processes().schedule(work, args=given, timeout=reward.timeout_s)
        self._given[future] = given
        return future

    def _processes(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self._drop_pool()
        if self._pool is None:
            timed = [(r.portable, r.arguments) for r in self.rewards if r.in_process]
            named = [one for one in timed if isinstance(one[0], str)]
            self._pool = ProcessPool(
                max(2, min(_PROCESSES, os.cpu_count() or 1)),
                initializer=prepare,
                initargs=(named,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=_run, args=(self._loop,), name="async rewards", daemon=True)
            self._loop_thread.start()
        return self._loop


async def _limited(reward: RewardFunction, offered: Mapping[str, Any], places: Sequence[int]) -> Said:
    """Await a function, or its time."""
    calling = asyncio.ensure_future(attempt_later(reward.call, offered, places))
    done, _ = await asyncio.wait([calling], timeout=reward.timeout_s)
    if not done:
        calling.cancel()
        return _late(reward)
    return Failure("cancelled itself") if calling.cancelled() else calling.result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()


def _late(reward: RewardFunction) -> Failure:
    return Failure(f"took longer than its timeout_s of {reward.timeout_s:g} s", late=True)


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {0 if code == EXITED else code}"
