"""Generation: completions that an engine generates for one rank, or for ranks that share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.processes.waiting import results_logged
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.types import Completion, SamplingParams, TokenPrompt

OnFinished = Callable[[int, Completion], None]  # called with the index of a prompt and its completion
_Request = tuple[TokenPrompt, int, SamplingParams]
Serve = Callable[[RolloutEngine, list[Any], OnFinished | None], list[Completion]]  # see serve()


class PendingCompletions:
    """Completions that an engine generates while its caller continues.

    Args:
        wait: function that waits for the completions and returns them in the order of the prompts; called once.
        source: completions that these are made of, whose times are then those of these; None without them.
    """

    def __init__(self, wait: Callable[[], list[Completion]], source: PendingCompletions | None = None) -> None:
        self._wait: Callable[[], list[Completion]] | None = wait
        self._source = source
        self._completions: list[Completion] = []
        self._finished_at: float | None = None
        self.requested_at: float = time.perf_counter() if source is None else source.requested_at

    @property
    def finished_at(self) -> float | None:
        """Time of the last completion, as of ``time.perf_counter()``; None if it is not finished, or not known."""
        known = self._finished_at if self._source is None else self._source.finished_at
        return known or self._finished_at

    def mark_finished(self) -> None:
        """Set the time of the last completion, if it is not set."""
        self._finished_at = self._finished_at or time.perf_counter()

    def result(self) -> list[Completion]:
        """Wait for the completions and return them.

        Raises:
            EngineDied: the engine has ended.
        """
        if self._wait is not None:
            self._completions = self._wait()
            self._wait = None
            self.mark_finished()
        return self._completions


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    on_finished: OnFinished | None = None,
) -> list[Completion]:
    """Return one completion per prompt, in their order, with the arguments and errors of :func:`submit`."""
    return submit(engine, prompts, sampling, seeds, on_finished).result()


def submit(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    on_finished: OnFinished | None = None,
) -> PendingCompletions:
    """Start to generate one completion per prompt with the weights of the last push.

    Later pushes do not change these completions, unless the engine mixes versions. If ranks share the engine, all of
    them call this and wait for their generations in the same order, even a rank without prompts.

    Args:
        engine: engine that was started.
        prompts: token ids of each prompt, or prompts with images.
        sampling: sampling parameters, the same on all ranks that share the engine.
        seeds: one per prompt, in [0, 2**63).
        on_finished: called with the index of a prompt and its completion as soon as that is finished. The call may come
            from another thread, but one at a time, and only on the first of the ranks that share the engine. All calls
            have returned when :meth:`PendingCompletions.result` returns.

    Raises:
        EngineDied: the engine has ended.
    """

    def request(requests: list[_Request], on_any: OnFinished | None) -> PendingCompletions:
        different = list(dict.fromkeys([sampling, *(parameters for _, _, parameters in requests)]))
        if len(different) > 1:
            raise UsageError(f"ranks that share an engine must have equal sampling parameters, got {different}")
        of_all = [prompt for prompt, _, _ in requests]
        futures = engine.request(of_all, [sampling] * len(requests), [seed for _, seed, _ in requests])
        return _gathered(engine, futures, on_any)

    requests = [(as_token_prompt(prompt), seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
    return _for_all_ranks(engine, request, requests, on_finished)


def as_token_prompt(prompt: Sequence[int]) -> TokenPrompt:
    """Return a prompt that is given by its token ids, or as it is."""
    return prompt if isinstance(prompt, TokenPrompt) else TokenPrompt(list(prompt))


def serve(
    engine: RolloutEngine, requests: Sequence[Any], handle: Serve, on_finished: OnFinished | None = None
) -> PendingCompletions:
    """Generate one completion for each request with a function of the caller, which calls ``engine.request``.

    The function runs in a thread, on the first of the ranks that share the engine, for the requests of all of them. All
    of these ranks call this, also those without requests. Unless the engine mixes versions, weights are pushed only
    after the completions were awaited.

    Args:
        engine: engine that was started.
        requests: requests of this rank, which can be pickled and compared.
        handle: function of the engine, requests and ``on_finished`` that returns the completions.
        on_finished: callback as for :func:`submit`.
    """

    def start(all_requests: list[Any], on_any: OnFinished | None) -> PendingCompletions:
        return _in_thread(lambda: handle(engine, all_requests, on_any))

    return _for_all_ranks(engine, start, requests, on_finished)


def _in_thread(run: Callable[[], list[Completion]]) -> PendingCompletions:
    """Call a function in a new thread; return the generation with its completions."""
    future: Future[list[Completion]] = Future()
    pending = PendingCompletions(future.result)

    def call() -> None:
        try:
            completions = run()
        except BaseException as error:  # raised again where the completions are read
            future.set_exception(error)
        else:
            pending.mark_finished()
            future.set_result(completions)

    threading.Thread(target=call, name="generation", daemon=True).start()
    return pending


def _gathered(
    engine: RolloutEngine, replies: Sequence[Future[Completion]], on_finished: OnFinished | None
) -> PendingCompletions:
    """Return the generation with the completions of some futures."""
    completions: list[Future[Completion]] = [Future() for _ in replies]
    pending = PendingCompletions(lambda: wait_for(completions, engine))
    missing = set(completions)
    one_at_a_time = threading.Lock()  # the replies of a server arrive in many threads

    def on_reply(index: int, reply: Future[Completion]) -> None:
        future = completions[index]
        try:
            completion = reply.result()
            if on_finished is not None:
                with one_at_a_time:
                    on_finished(index, completion)
        except BaseException as error:  # raised where the completions are read
            missing.discard(future)
            future.set_exception(error)
            return
        missing.discard(future)
        if not missing:
            pending.mark_finished()
        future.set_result(completion)

    for index, reply in enumerate(replies):
        reply.add_done_callback(partial(on_reply, index))
    return pending


def wait_for(futures: Sequence[Future[Completion]], engine: RolloutEngine) -> list[Completion]:
    """Wait for completions without a time limit; log a line every minute.

    Raises:
        EngineDied: the engine has ended.
    """
    return results_logged(futures, "completions", engine.source)


def _for_all_ranks(
    engine: RolloutEngine,
    start: Callable[[list[Any], OnFinished | None], PendingCompletions],
    requests: Sequence[Any],
    on_finished: OnFinished | None,
) -> PendingCompletions:
    """Start the requests of all ranks that share the engine on the first one, identical ones of several ranks once.

    Args:
        engine: engine of the ranks.
        start: function that starts to generate one completion for each request, called on the first rank.
        requests: requests of this rank, which can be pickled and compared.
        on_finished: callback for the first rank's own completions as they finish; not called on other ranks.

    Returns:
        This rank's completions; an error of the first rank is raised there, on all ranks.
    """
    group = engine.group
    if group is None:
        return start(list(requests), on_finished)
    by_rank = group.gather(list(requests))
    unique = [of_rank for rank, of_rank in enumerate(by_rank) if of_rank not in by_rank[:rank]]

    def on_any_finished(index: int, completion: Completion) -> None:
        if on_finished is not None and index < len(requests):  # the first rank's requests are the first ones
            on_finished(index, completion)

    def results() -> list[list[Completion]]:
        completions = iter(pending.result())
        by_request = [[next(completions) for _ in of_rank] for of_rank in unique]
        return [by_request[unique.index(of_rank)] for of_rank in by_rank]

    if not group.is_first:
        return PendingCompletions(lambda: group.scatter_from_first(list))
    try:
        pending = start([request for of_rank in unique for request in of_rank], on_any_finished)
    except Exception as error:
        pending = PendingCompletions(partial(_raise, error))
    return PendingCompletions(lambda: group.scatter_from_first(results), pending)


def _raise(error: Exception) -> list[Completion]:
    raise error


@dataclass(frozen=True)
class CompletionCheck:
    """Validation of the completions of one call of :func:`generate`.

    Args:
        max_tokens: largest number of tokens in a response.
        version: version of the policy that was pushed last before the request.
        vocabulary: V, number of tokens of the actor.
        allows_newer: whether tokens of later versions are valid, as from an engine that mixes versions.
    """

    max_tokens: int
    version: int
    vocabulary: int
    allows_newer: bool = False

    def check_one(self, completion: Completion) -> None:
        """Validate one completion.

        Raises:
            RuntimeError: the completion is too long, from another policy version, or has a token unknown to the actor.
        """
        ids = completion.token_ids
        versions = {completion.policy_version, *(version for _, version in completion.later_versions)}
        if min(versions) < self.version or (max(versions) > self.version and not self.allows_newer):
            raise RunError(
                f"the engine returned a completion of policy version {completion.policy_version}, but the last pushed "
                f"version is {self.version}: its weights are not the actor's"
            )
        if len(ids) > self.max_tokens:
            raise RunError(f"the engine returned {len(ids)} tokens where at most {self.max_tokens} were requested")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            raise RunError(f"the engine returned token {wrong}; the actor has tokens 0 to {self.vocabulary - 1}")

    def check_all(self, completions: Sequence[Completion], prompts: int) -> None:
        """Validate the completions of all prompts.

        Args:
            completions: completions of the engine.
            prompts: number of requests.

        Raises:
            RuntimeError: a completion is missing or invalid.
        """
        if len(completions) != prompts:
            raise RunError(f"the engine returned {len(completions)} completions for {prompts} prompts")
        for completion in completions:
            self.check_one(completion)

    def before(self, on_finished: OnFinished | None) -> OnFinished | None:
        """Return a callback that validates a completion and then calls ``on_finished``, if that is set."""
        if on_finished is None:
            return None

        def check_and_call(index: int, completion: Completion) -> None:
            self.check_one(completion)
            on_finished(index, completion)

        return check_and_call
