"""Rollouts that are requested from the engine before the step that trains on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_rlhf.conversation_record import ConversationRecord
from lightning_rlhf.data.resumable import ResumableLoader
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import RolloutRewards
from lightning_rlhf.rollout.collect import Collector
from lightning_rlhf.rollout.engine import Generation
from lightning_rlhf.strategies import ranks
from lightning_rlhf.types import Completion, PromptBatch, Rollout

_Prompt = tuple[int, int, float, int]  # step, responses per prompt, temperature, number of the prompt in the data


@dataclass(frozen=True)
class RolloutRequest:
    """Responses to some prompts that were requested from the engine, and their rewards.

    Args:
        step: number of finished steps before the one that trains on the responses.
        prompts: N prompts of this rank.
        samples: responses per prompt.
        temperature: temperature of the sampling.
        generation: completions in the order of the prompts.
        collector: collector that scores them.
        is_ahead: whether the responses were requested in an earlier step.
        is_restored: whether they are from a checkpoint.
    """

    step: int
    prompts: PromptBatch
    samples: int
    temperature: float
    generation: Generation
    collector: Collector
    is_ahead: bool = False
    is_restored: bool = False

    def completions(self) -> list[Completion]:
        """Wait for the completions and return them.

        Raises:
            RuntimeError: a completion is missing or invalid, or the engine has ended.
        """
        return self.generation.completions()

    def rollout(self) -> tuple[Rollout, RolloutRewards]:
        """Wait for the completions, score them and return the rollout with the results of the reward functions."""
        return self.collector.rollout(self.completions(), self.temperature)

    def unscored_rollout(self) -> tuple[Rollout, Callable[[], RolloutRewards]]:
        """Wait for the completions and start to score them.

        Returns:
            The rollout with rewards of NaN, and a function that waits for the results of the reward functions.
        """
        return self.collector.begin(self.completions(), self.temperature)

    @property
    def interval(self) -> tuple[float, float]:
        """Times of the request and of the last completion, or now if that is missing, seconds of an arbitrary clock."""
        return self.generation.requested_at, self.generation.finished_at or time.perf_counter()


@dataclass
class RequestsAhead:
    """Requests for later steps, by step, and the idle times of engine and trainer.

    A checkpoint contains the completions of these requests, because the weights that generated them are lost.
    """

    _requests: dict[int, list[RolloutRequest]] = field(default_factory=dict)
    _restored: dict[_Prompt, list[Completion]] = field(default_factory=dict)
    _loaded: list[dict[str, Any]] = field(default_factory=list)  # the same for all ranks, without requested steps
    _snapshot: tuple[list[dict[str, Any]], list[RolloutRequest]] = field(default_factory=lambda: ([], []))
    _generations: list[Generation] = field(default_factory=list)  # of the current window
    _window_start: float | None = None
    _waited: float = 0.0  # in the current window, seconds

    def __contains__(self, step: int) -> bool:
        return step in self._requests

    def add(self, requests: list[RolloutRequest]) -> None:
        """Store the requests for a later step."""
        self._requests[requests[0].step] = requests

    def track(self, generation: Generation) -> None:
        """Count the time of a generation as work of the engine."""
        self._generations.append(generation)

    def pop(self, step: int) -> list[RolloutRequest]:
        """Return the requests for a step and forget them."""
        return self._requests.pop(step, [])

    def wait(self, requests: Iterable[RolloutRequest]) -> None:
        """Wait for the completions of some requests."""
        started = time.perf_counter()
        for request in requests:
            request.completions()
        self._waited += time.perf_counter() - started

    def wait_for_all(self) -> None:
        """Wait for the completions of all requests."""
        self.wait(self._all())

    def _all(self) -> list[RolloutRequest]:
        return [request for step in sorted(self._requests) for request in self._requests[step]]

    def idle_shares(self) -> dict[str, float]:
        """Return the shares of the time since the last call in which trainer and engine did nothing; then restart.

        The first call returns nothing.
        """
        now = time.perf_counter()
        start, waited = self._window_start, self._waited
        busy = [(each.requested_at, each.finished_at or now) for each in self._generations]
        self._window_start, self._waited = now, 0.0
        self._generations = [each for each in self._generations if each.finished_at is None]
        if start is None:
            return {}
        return {
            "perf/trainer_idle_share": waited / (now - start),
            "perf/engine_idle_share": 1 - covered(busy, start, now) / (now - start),
        }

    # -- checkpoints ------------------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep the current requests for :meth:`snapshot_state`, without waiting for them."""
        self._snapshot = self._loaded, self._all()

    def snapshot_state(self) -> list[dict[str, Any]]:
        """Wait for the requests of the last snapshot; return their completions as values and tensors. All ranks."""
        loaded, requests = self._snapshot
        self.wait(requests)
        return [*loaded, *(part for own in ranks.from_all_ranks([_packed(each) for each in requests]) for part in own)]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Store completions of a checkpoint, for :meth:`restored`."""
        self._loaded = state
        self._restored = {key: completions for part in state for key, completions in _unpacked(part)}

    def restored(self, step: int, prompts: PromptBatch, samples: int, temperature: float) -> list[Completion] | None:
        """Return the completions of a checkpoint for a request and forget them; None if it has none."""
        self._loaded = [part for part in self._loaded if part["step"] != step]
        keys = [(step, samples, temperature, index) for index in prompts.indices]
        if not all(key in self._restored for key in keys):
            return None
        return [completion for key in keys for completion in self._restored.pop(key)]


def conversations_of(requests: Iterable[RolloutRequest]) -> dict[int, ConversationRecord]:
    """Return the records of the sampled conversations of a step, by their position among all responses."""
    records = {}
    for request in (own for own in requests if own.temperature > 0):
        prompts = request.prompts.positions or range(len(request.prompts))
        positions = [prompt * request.samples + k for prompt in prompts for k in range(request.samples)]
        for position, completion in zip(positions, request.completions(), strict=True):
            if completion.conversation is not None:
                records[position] = completion.conversation
    return records


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the length of the part of [start, end] that is in at least one of the intervals."""
    total = 0.0
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, start), min(finish, end)
        if finish > begin:
            total += finish - begin
            start = finish
    return total


def _packed(request: RolloutRequest) -> dict[str, Any]:
    completions = request.completions()
    return {
        "step": request.step,
        "samples": request.samples,
        "temperature": request.temperature,
        "indices": list(request.prompts.indices),
        "tokens": [len(completion.token_ids) for completion in completions],
        "token_ids": torch.tensor([token for each in completions for token in each.token_ids], dtype=torch.int32),
        "logprobs": torch.tensor([value for each in completions for value in each.logprobs], dtype=torch.float32),
        "finish_reasons": [completion.finish_reason for completion in completions],
        "policy_versions": [completion.policy_version for completion in completions],
        "later_versions": [[list(later) for later in completion.later_versions] for completion in completions],
        "sampled": [completion.sampled and list(completion.sampled) for completion in completions],
        "conversations": [
            None if each.conversation is None else {**vars(each.conversation), "environment_s": 0.0}
            for each in completions  # seconds would make equal checkpoints differ
        ],
    }


def _unpacked(state: dict[str, Any]) -> Iterator[tuple[_Prompt, list[Completion]]]:
    ids = [row.tolist() for row in state["token_ids"].split(state["tokens"])]
    logprobs = [row.tolist() for row in state["logprobs"].split(state["tokens"])]
    later = [tuple((start, version) for start, version in each) for each in state["later_versions"]]
    sampled = [own and tuple(own) for own in state.get("sampled") or [None] * len(ids)]
    records = [own and ConversationRecord(**own) for own in state.get("conversations") or [None] * len(ids)]
    completions = [
        Completion(
            token_ids=ids[i],
            logprobs=logprobs[i],
            finish_reason=state["finish_reasons"][i],
            policy_version=state["policy_versions"][i],
            later_versions=later[i],
            sampled=sampled[i],
            conversation=records[i],
        )
        for i in range(len(ids))
    ]
    samples = state["samples"]
    for number, index in enumerate(state["indices"]):
        key = (state["step"], samples, state["temperature"], index)
        yield key, completions[number * samples : (number + 1) * samples]


def upcoming_batches(trainer: Trainer, batch_idx: int, count: int) -> Iterator[tuple[int, PromptBatch]]:
    """Yield (step, prompts of this rank) of the next training batches, fewer where the run ends before.

    Args:
        trainer: trainer at the start of a training batch.
        batch_idx: number of this batch in the epoch.
        count: number of batches after this one.

    Raises:
        ValueError: the training data loader is not a ResumableLoader, so later batches are unknown.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, ResumableLoader):
        raise UsageError(
            f"max_staleness requests the prompts of later steps, which needs the data loader of PromptDataModule, got "
            f"{type(loader).__name__}: set max_staleness to 0, or do not override train_dataloader"
        )
    size = int(trainer.num_training_batches)
    for ahead in range(1, count + 1):
        epochs, batch = divmod(batch_idx + ahead, size)
        epoch, step = trainer.current_epoch + epochs, trainer.global_step + ahead
        if 0 <= trainer.max_steps <= step or (trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch):
            return
        yield step, loader.batch_at(epoch, batch)
