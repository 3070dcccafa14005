"""Rollouts of the training steps: sync the weights, sample, score, assemble, check.

Each feature of the rollouts is a source that wraps another one, in a separate file; ``callbacks/loop/rollout_parts.py``
puts them in order.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.rewards.executor import MetricSums, RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.generation import Generation
from lightning_rlhf.rollout.sampler import Sampler, Sampling
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.rollout.weights import EngineWeights
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import Completion, ConversationRecord, PromptBatch, Rollout, StepRollout


@dataclass(frozen=True)
class Request:
    """Responses to some prompts that were requested from the engine.

    Args:
        step: index, from 0, of the step that trains on the responses.
        prompts: N prompts of this rank.
        sampling: number and kind of the responses to each.
        generation: completions in the order of the prompts.
        scorer: their rewards.
    """

    step: int
    prompts: PromptBatch
    sampling: Sampling
    generation: Generation
    scorer: Scorer

    def completions(self) -> list[Completion]:
        """Wait for the completions and return them.

        Raises:
            RuntimeError: a completion is missing or invalid, or the engine has ended.
        """
        return self.generation.completions()

    @property
    def is_current(self) -> bool:
        """Whether all responses are from the weights that the step starts from; waits for them."""
        return all(completion.policy_version == self.step for completion in self.completions())

    @property
    def interval(self) -> tuple[float, float]:
        """Times of the request and of the last completion, as of ``time.perf_counter``; now if it is unfinished."""
        return self.generation.requested_at, self.generation.finished_at or time.perf_counter()


@dataclass(frozen=True)
class Requests:
    """All requests of a source for one step.

    Args:
        prompts: prompts of the step on this rank.
        requests: requests so far, at least one.
    """

    prompts: PromptBatch
    requests: tuple[Request, ...]

    def wait(self) -> None:
        """Wait for the completions of all requests."""
        for request in self.requests:
            request.completions()


@dataclass(frozen=True)
class PendingRewards:
    """Rewards of a rollout that are still being computed.

    Args:
        scorer: scorer of the responses, which has begun on the group leader.
        roles: strategy of the run, which knows the leader.
        clock: clock of the step.
    """

    scorer: Scorer
    roles: RoleStrategy
    clock: Clock

    def wait(self, rollout: Rollout) -> tuple[Rollout, MetricSums]:
        """Wait for the rewards; return the rollout with them, and their metrics. All ranks with the same data."""
        with self.clock("time/reward_s"):
            scored = self.roles.run_on_group_leader(self.scorer.wait)
        return self.scorer.add_rewards(rollout, scored), scored.metrics


@dataclass(frozen=True)
class SampledRollout(StepRollout):
    """Rollout of a step with its requests and metrics.

    Args:
        pending: rewards that are still being computed; None if the rollout has them.
        requests: all requests of the step, those of rows that are not trained on included.
        reward_sums: metrics of the reward functions.
        metrics: metrics of a source, over all ranks.
    """

    pending: PendingRewards | None = None
    requests: tuple[Request, ...] = ()
    reward_sums: tuple[MetricSums, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    def scored(self) -> SampledRollout:
        """Wait for pending rewards; return the rollout with them. All ranks with the same data."""
        if self.pending is None:
            return self
        rollout, sums = self.pending.wait(self.rollout)
        return replace(self, rollout=rollout, pending=None, reward_sums=(*self.reward_sums, sums))


class Source(ABC):
    """Source of rollouts. Between :meth:`start` and :meth:`finish` of a step, the next steps may start."""

    @abstractmethod
    def start(self, prompts: PromptBatch, step: int, in_background: bool = False) -> Requests:
        """Request the responses of a step.

        Args:
            prompts: prompts of this rank.
            step: index, from 0, of the step that trains on the responses.
            in_background: whether the engine begins now, while the caller continues.
        """

    @abstractmethod
    def finish(self, requests: Requests) -> SampledRollout:
        """Wait for the responses and begin to score them; return the rollout, whose rewards may be pending."""


@dataclass(frozen=True)
class OnPolicy:
    """Rollouts of the weights that a step starts from.

    Args:
        source: source of the responses.
        weights: weights of the engine.
    """

    source: Source
    weights: EngineWeights

    def __call__(self, prompts: PromptBatch, step: int) -> SampledRollout:
        """Return the rollout of a step. All ranks.

        Args:
            prompts: prompts of this rank.
            step: index of the step, from 0.
        """
        self.weights.sync(step)
        requests = self.source.start(prompts, step)
        sampled = self.source.finish(requests)
        self.weights.check(sampled.rollout)
        return sampled


@dataclass(frozen=True)
class RolloutSource(Source):
    """Samples a group of responses to each prompt and scores them.

    Args:
        sampler: sampler of the responses.
        sampling: number and kind of the responses to each prompt.
        executor: executor of the reward functions.
        weights: weights of the engine.
        roles: strategy of the run.
        progress: function of a step and its prompts that returns the progress of the run.
        clock: clock of the step.
    """

    sampler: Sampler
    sampling: Sampling
    executor: RewardExecutor
    weights: EngineWeights
    roles: RoleStrategy
    progress: Callable[[int, PromptBatch], TrainerState]
    clock: Clock

    def start(self, prompts: PromptBatch, step: int, in_background: bool = False) -> Requests:
        """See :meth:`Source.start`."""
        sampler = self.sampler
        scorer = Scorer(
            prompts,
            self.executor,
            sampler.tokenizer,
            samples=self.sampling.samples,
            state=self.progress(step, prompts),
            environment=sampler.environment,
        )
        generation = sampler.start(
            prompts,
            self.sampling,
            step,
            self.weights.version,
            on_finished=scorer.add if self.roles.is_group_leader else None,
            in_background=in_background,
        )
        return Requests(prompts, (Request(step, prompts, self.sampling, generation, scorer),))

    def finish(self, requests: Requests) -> SampledRollout:
        """See :meth:`Source.finish`."""
        (request,) = requests.requests
        with self.clock("time/generate_s"):
            completions = request.completions()

        def begin() -> Rollout:
            request.scorer.begin(completions)
            return assemble(request.prompts, completions, self.sampling.temperature, self.sampler.environment)

        with self.clock("time/reward_s"):
            rollout = self.roles.run_on_group_leader(begin)
        return SampledRollout(
            rollout, pending=PendingRewards(request.scorer, self.roles, self.clock), requests=(request,)
        )


def conversations_of(requests: Iterable[Request]) -> dict[int, ConversationRecord]:
    """Return the records of the sampled conversations of a step, by their position among all responses."""
    records = {}
    for request in requests:
        if request.sampling.temperature == 0:  # greedy responses, which are baselines
            continue
        samples = request.sampling.samples
        prompts = request.prompts.positions or range(len(request.prompts))
        positions = [prompt * samples + k for prompt in prompts for k in range(samples)]
        for position, completion in zip(positions, request.completions(), strict=True):
            if completion.conversation is not None:
                records[position] = completion.conversation
    return records


def assemble(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    temperature: float = 1.0,
    environment: EnvironmentSettings | None = None,
) -> Rollout:
    """Return the rollout of completions, whose rewards are NaN until :meth:`.Scorer.add_rewards` sets them.

    Args:
        prompts: N prompts.
        completions: B = N x G completions, grouped by prompt.
        temperature: temperature of the sampling.
        environment: settings of the environment whose conversations the completions are; None without one.

    Raises:
        ValueError: the number of completions is 0, or not a multiple of the number of prompts.
    """
    if not completions or len(completions) % len(prompts):
        raise UsageError(
            f"got {len(completions)} completions for {len(prompts)} prompts; each needs the same number, at least 1"
        )
    samples = len(completions) // len(prompts)
    records = [completion.conversation for completion in completions]
    prompt_rows = [ids for ids in prompts.token_ids for _ in range(samples)]
    prompt_ids, prompt_lengths = pad_right(
        [ids if record is None else record.prompt_ids for ids, record in zip(prompt_rows, records, strict=True)]
    )
    response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
    real = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
    mask = real.clone()
    mask[real] = torch.tensor([is_sampled for completion in completions for is_sampled in _sampled(completion)])
    logprobs = torch.zeros(response_ids.shape)
    logprobs[real] = torch.tensor([value for completion in completions for value in completion.logprobs])
    versions = torch.zeros_like(response_ids)
    versions[real] = torch.tensor([version for completion in completions for version in completion.token_versions])
    leaves_out_failed = environment is not None and environment.on_error == "skip"
    failed = torch.tensor([record is not None and record.fault is not None for record in records])
    numbers = prompts.positions or range(len(prompts))
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        response_ids=response_ids,
        response_lengths=response_lengths,
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards={},
        reward=torch.full((len(completions),), math.nan),
        group=torch.arange(len(prompts)).repeat_interleave(samples),
        truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
        policy_version=versions.masked_fill(~mask, 0),
        included=~failed if leaves_out_failed else torch.ones_like(failed),
        position=torch.tensor([number * samples + k for number in numbers for k in range(samples)]),
        temperature=temperature,
        step_rewards=_step_rewards(completions, environment, response_ids.shape[1]),
        text_starts=_text_starts(completions, environment, response_ids.shape[1]),
        source=torch.tensor(prompts.sources).repeat_interleave(samples) if prompts.sources else None,
        images=_images(prompts, records),
        prompt_images=_prompt_images(prompts, records),
        written_images={image.number: image for record in records if record is not None for image in record.images},
    )


def _images(prompts: PromptBatch, records: Sequence[ConversationRecord | None]) -> Tensor | None:
    """Return (B, K) int64 numbers of the images of each row; None without images."""
    if not prompts.images and not any(record is not None and record.images for record in records):
        return None
    samples = len(records) // len(prompts)
    most = max(len(record.images) if record is not None else 0 for record in records)
    if not prompts.images or most > (torch.tensor([each.numbers for each in prompts.images]) < 0).sum(1).min():
        raise UsageError(
            f"a conversation of the checkpoint has {counted(most, 'image')}, more than max_images of the environment "
            f"allows: resume with the max_images with which it was generated"
        )
    numbers = torch.tensor([images.numbers for images in prompts.images], dtype=torch.int64).repeat_interleave(
        samples, 0
    )
    for row, record in enumerate(records):
        if record is not None and record.images:
            first = int((numbers[row] >= 0).sum())
            numbers[row, first : first + len(record.images)] = torch.tensor([image.number for image in record.images])
    return numbers


def _prompt_images(prompts: PromptBatch, records: Sequence[ConversationRecord | None]) -> Tensor | None:
    """Return the (B,) int64 number of the images in each row's prompt; None without images."""
    if not prompts.images:
        return None
    samples = len(records) // len(prompts)
    counts = [len(images.images) for images in prompts.images for _ in range(samples)]
    pairs = zip(counts, records, strict=True)
    return torch.tensor([count if record is None else count + record.images_in_prompt for count, record in pairs])


def _sampled(completion: Completion) -> Sequence[bool]:
    """Return whether the policy sampled each token."""
    return completion.sampled or [True] * len(completion.token_ids)


def _step_rewards(
    completions: Sequence[Completion], environment: EnvironmentSettings | None, width: int
) -> Tensor | None:
    """Return (B, T) weighted rewards of turns before the last; None without an environment."""
    if environment is None:
        return None
    rewards = torch.zeros(len(completions), width)
    for row, completion in enumerate(completions):
        if (record := completion.conversation) is not None:
            for end, value in zip(record.turn_ends[:-1], record.turn_rewards, strict=False):
                rewards[row, end - 1] = environment.weight * value
    return rewards


def _text_starts(
    completions: Sequence[Completion], environment: EnvironmentSettings | None, width: int
) -> Tensor | None:
    """Return (B, T) bool, the starts of further branches; None without an agent."""
    if environment is None or not environment.is_agent:
        return None
    starts = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        if completion.conversation is not None:
            starts[row, completion.conversation.text_starts] = True
    return starts


def collect(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    rewards: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 1.0,
) -> Rollout:
    """Score completions and return the rollout.

    Args:
        prompts: N prompts.
        completions: B = N x G completions, grouped by prompt.
        rewards: reward functions.
        tokenizer: tokenizer that decodes responses for the functions.
        temperature: temperature of the sampling.

    Returns:
        The rollout; rows are in the order of the completions.

    Raises:
        ValueError: the number of completions is not a multiple of the number of prompts.
        RuntimeError: a reward function failed.
    """
    rollout = assemble(prompts, completions, temperature)
    with RewardExecutor(rewards) as executor:
        scorer = Scorer(prompts, executor, tokenizer, len(completions) // len(prompts))
        return scorer.add_rewards(rollout, scorer.score(completions))
