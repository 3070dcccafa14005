"""Ahead: responses are requested steps before the one that trains on them, so that the engine generates meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.image_parts import converted_images, images_of
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.generation import OnFinished, PendingCompletions
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.sampler import Sampler, Sampling
from lightning_rlhf.rollout.source import SampledRollout, Source, StepRequests
from lightning_rlhf.rollout.weights import EngineWeights
from lightning_rlhf.strategies import ranks
from lightning_rlhf.types import AllowedTokens, Completion, ConversationRecord, PromptBatch

log = logging.getLogger(__name__)
_Prompt = tuple[int, int, float, int]  # step, responses per prompt, temperature, number of the prompt in the data
Upcoming = Callable[[], Iterable[tuple[int, PromptBatch]]]


class PushChecks(Protocol):
    """Comparisons of engine and actor after pushes whose first responses are used in a later step."""

    def check_until(self, version: int) -> None:
        """Wait for the comparisons of pushes up to a version, and raise RuntimeError if one failed. All ranks."""

    def launch(self, request: StepRequests, version: int) -> None:
        """Launch the comparison for the newest push, with texts of a finished request. All ranks."""


@dataclass
class Ahead:
    """Rollouts of older weights: in each step, the responses of the next k steps are requested from another source.

    A checkpoint contains the completions of these requests, because the weights that generated them are lost.

    Args:
        source: source of the responses.
        weights: weights of the engine.
        restored: completions of a checkpoint, which the sampler of the source returns.
        checks: comparisons of engine and actor.
        upcoming: function that returns steps and prompts of the next k steps, fewer at the end of the run.
        max_staleness: k, at least 1.
        waits_before_push: whether all requests must be finished before a push, as the turns of a conversation are from
            the same weights.
    """

    source: Source
    weights: EngineWeights
    restored: RestoredCompletions
    checks: PushChecks
    upcoming: Upcoming
    max_staleness: int
    waits_before_push: bool
    clock: Clock
    _requests: dict[int, StepRequests] = field(default_factory=dict)  # by step
    _snapshot: tuple[list[dict[str, Any]], list[StepRequests]] = field(default_factory=lambda: ([], []))
    _idle: IdleTimes = field(default_factory=lambda: IdleTimes())

    def __call__(self, prompts: PromptBatch, step: int) -> SampledRollout:
        """Return the rollout of a step, and request those of the next ones. All ranks.

        Args:
            prompts: prompts of this rank.
            step: number of finished steps.
        """
        requests = self._requests.pop(step, None)
        if requests is None or self.weights.pushed is None:
            self.weights.sync(step)
        requests = requests or self._request(prompts, step)
        with self.clock("time/generate_s"):
            for request in requests.all:
                request.completions()
        metrics = self._idle.shares(self.clock)
        self.sync(step)
        is_current = all(request.is_current for request in requests.all)
        if not is_current:  # the first responses of a run are compared themselves
            with self.clock("time/check_s"):
                self.checks.check_until(step - self.max_staleness)
                self.checks.launch(requests, step)
        for later_step, later_prompts in self.upcoming():
            if later_step not in self._requests:
                self._requests[later_step] = self._request(later_prompts, later_step, in_background=True)
        sampled = self.source.collect(requests)
        self._idle.add(sampled.requests)
        if is_current:
            self.weights.check(sampled.rollout)
        return replace(sampled, metrics={**metrics, **sampled.metrics})

    def _request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        requests = self.source.request(prompts, step, in_background)
        self._idle.add(requests.all)
        return requests

    def sync(self, step: int) -> None:
        """Push the weights, after the requests that must not mix them."""
        if self.waits_before_push and self.weights.pushed != step:
            self.wait_for_completions()
        self.weights.sync(step)

    def wait_for_completions(self) -> None:
        """Wait for the completions of all requests for later steps."""
        with self.clock("time/generate_s"):
            for request in self._all():
                request.completions()

    def _all(self) -> list[StepRequests]:
        return [request for step in sorted(self._requests) for request in self._requests[step].all]

    # -- checkpoints ------------------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep the current requests for :meth:`snapshot_state`, without waiting for them."""
        self._snapshot = self.restored.parts, self._all()

    def snapshot_state(self) -> list[dict[str, Any]]:
        """Wait for the requests of the last snapshot; return their completions as values and tensors. All ranks.

        If the requests of a rank fail, the result lacks those of all ranks, and a resumed run sends them again.
        """
        parts, requests = self._snapshot
        completed: list[dict[str, Any]] | None = None
        try:
            completed = [packed_completions(request) for request in requests]
        except (RuntimeError, ValueError) as error:  # raised again by the step that uses the responses
            log.warning("The checkpoint has no responses for later steps, because their generation failed: %s", error)
        packed = ranks.from_all_ranks(completed)
        if None in packed:
            return parts
        return [*parts, *(part for of_rank in packed for part in of_rank or [])]


@dataclass
class RestoredCompletions:
    """Completions of a checkpoint for requests of later steps.

    Attributes:
        parts: completions as in the checkpoint, the same for all ranks, without those of steps that were requested.
        steps: steps of which the checkpoint has completions.
    """

    parts: list[dict[str, Any]] = field(default_factory=list)
    steps: frozenset[int] = frozenset()
    _by_prompt: dict[_Prompt, list[Completion]] = field(default_factory=dict)

    def load(self, parts: list[dict[str, Any]]) -> None:
        """Store the completions of a checkpoint."""
        self.parts = parts
        self.steps = frozenset(part["step"] for part in parts)
        self._by_prompt = {key: completions for part in parts for key, completions in unpacked_completions(part)}

    def pop(
        self, step: int, prompts: PromptBatch, sampling: Sampling, group: RankGroup | None = None
    ) -> list[Completion] | None:
        """Return the completions for a request and forget them; None if the checkpoint does not have all of them.

        Args:
            step: step of the request.
            prompts: prompts of this rank, possibly none.
            sampling: sampling of the request.
            group: ranks that must all have theirs, because they send requests together.
        """
        if step not in self.steps:
            return None
        self.parts = [part for part in self.parts if part["step"] != step]
        keys = [(step, sampling.samples, sampling.temperature, prompt.index) for prompt in prompts]
        has_all = all(key in self._by_prompt for key in keys)
        if group is not None:
            of_ranks = group.gather(has_all)
            has_all = group.run_on_first(lambda: all(of_ranks))
        if not has_all:
            return None
        return [completion for key in keys for completion in self._by_prompt.pop(key)]


class RestoredResponses(PendingCompletions):
    """Completions of a checkpoint, whose times are not known."""


@dataclass(frozen=True)
class RestoringSampler:
    """Returns completions of a checkpoint where there are some, else those of another sampler.

    Args:
        restored: completions of a checkpoint.
        engine: engine of the run, whose ranks send requests together.
    """

    sampler: Sampler
    restored: RestoredCompletions
    engine: RolloutEngine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer that decodes responses for reward functions."""
        return self.sampler.tokenizer

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Settings of the environment whose conversations the responses are; None without one."""
        return self.sampler.environment

    def sample(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        step: int,
        version: int,
        on_finished: OnFinished | None = None,
        in_background: bool = False,
    ) -> PendingCompletions:
        """See :meth:`Sampler.sample`."""
        completions = self.restored.pop(step, prompts, sampling, self.engine.group)
        if completions is not None:
            return RestoredResponses(lambda: completions)
        return self.sampler.sample(
            prompts, sampling, step, version, on_finished=on_finished, in_background=in_background
        )


@dataclass
class IdleTimes:
    """Fractions of the time in which trainer and engine do nothing, over the window since the last step's request."""

    _pending: list[PendingCompletions] = field(default_factory=list)  # that may lie in the window
    _start: float | None = None
    _waited: float = 0.0  # seconds that the clock had counted at the start of the window

    def add(self, requests: Iterable[StepRequests]) -> None:
        """Count the time of requests as work of the engine; a request may be added twice."""
        known = {id(pending) for pending in self._pending}
        self._pending += [request.pending for request in requests if id(request.pending) not in known]

    def shares(self, clock: Clock) -> dict[str, float]:
        """Return the fractions of the window that ends now, and begin the next one; the first call returns nothing.

        Args:
            clock: clock that counts the time in which the trainer waits for responses.
        """
        now = time.perf_counter()
        start, waited = self._start, clock.total["time/generate_s"] - self._waited
        busy = [(each.requested_at, each.finished_at or now) for each in self._pending]
        self._start, self._waited = now, clock.total["time/generate_s"]
        self._pending = [each for each in self._pending if each.finished_at is None]
        if start is None:
            return {}
        return {
            "perf/trainer_idle_fraction": waited / (now - start),
            "perf/engine_idle_fraction": 1 - covered(busy, start, now) / (now - start),
        }


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the length of the part of [start, end] that is in at least one of the intervals."""
    total = 0.0
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, start), min(finish, end)
        if finish > begin:
            total += finish - begin
            start = finish
    return total


def packed_completions(request: StepRequests) -> dict[str, Any]:
    """Wait for the completions of a request; return them as values and tensors that a checkpoint may have."""
    completions = request.completions()
    return {
        "step": request.step,
        "samples": request.sampling.samples,
        "temperature": request.sampling.temperature,
        "indices": [prompt.index for prompt in request.prompts],
        "tokens": [len(completion.token_ids) for completion in completions],
        "token_ids": torch.tensor([token for each in completions for token in each.token_ids], dtype=torch.int32),
        "logprobs": torch.tensor([value for each in completions for value in each.logprobs], dtype=torch.float32),
        "finish_reasons": [completion.finish_reason for completion in completions],
        "policy_versions": [completion.policy_version for completion in completions],
        "later_versions": [[list(later) for later in completion.later_versions] for completion in completions],
        "sampled": [completion.sampled and list(completion.sampled) for completion in completions],
        "conversations": [
            None if each.conversation is None else _packed_record(each.conversation) for each in completions
        ],
        "allowed": [
            None if each.allowed is None else (each.allowed.counts, each.allowed.listed()[1].int())
            for each in completions
        ],
        "experts": [each.experts for each in completions],
    }


def _packed_record(record: ConversationRecord) -> dict[str, Any]:
    """Return the fields of a record as values that a checkpoint may have: images by their SHA-256, and their bytes."""
    return {
        **vars(record),
        "environment_s": 0.0,  # seconds would make equal checkpoints differ
        "messages": converted_images(record.messages, lambda image: {"type": "image", "image": image.sha256}),
        "images": [image.sha256 for image in record.images],
        "encoded_images": [image.as_fields() for image in dict.fromkeys(images_of(record.messages))],
    }


def _unpacked_record(packed: dict[str, Any]) -> ConversationRecord:
    fields = dict(packed)
    encoded = [EncodedImage.of_fields(each) for each in fields.pop("encoded_images", ())]
    images = {image.sha256: image for image in encoded}
    fields["messages"] = converted_images(fields["messages"], lambda key: {"type": "image", "image": images[key]})
    fields["images"] = tuple(images[key] for key in fields.get("images", ()))
    return ConversationRecord(**fields)


def unpacked_completions(state: dict[str, Any]) -> Iterator[tuple[_Prompt, list[Completion]]]:
    """Yield step, samples, temperature and number in the data of each prompt of a request, with its completions."""
    ids = [row.tolist() for row in state["token_ids"].split(state["tokens"])]
    logprobs = [row.tolist() for row in state["logprobs"].split(state["tokens"])]
    later = [tuple((start, version) for start, version in each) for each in state["later_versions"]]
    sampled = [marks and tuple(marks) for marks in state.get("sampled") or [None] * len(ids)]
    records = [values and _unpacked_record(values) for values in state.get("conversations") or [None] * len(ids)]
    allowed = [values and AllowedTokens.of(*values) for values in state.get("allowed") or [None] * len(ids)]
    completions = [
        Completion(
            token_ids=ids[i],
            logprobs=logprobs[i],
            finish_reason=state["finish_reasons"][i],
            policy_version=state["policy_versions"][i],
            later_versions=later[i],
            sampled=sampled[i],
            conversation=records[i],
            allowed=allowed[i],
            experts=(state.get("experts") or [None] * len(ids))[i],
        )
        for i in range(len(ids))
    ]
    samples = state["samples"]
    for number, index in enumerate(state["indices"]):
        key = (state["step"], samples, state["temperature"], index)
        yield key, completions[number * samples : (number + 1) * samples]
