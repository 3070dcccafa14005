"""Rollouts of the training steps: sync the weights, sample, score, assemble, check.

Each feature of the rollouts is a source that wraps another one, in a separate file; ``callbacks/loop/rollout_parts.py``
puts them in order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from typing_extensions import override

from lightning_rlhf.rewards.executor import MetricSums, RewardExecutor
from lightning_rlhf.rewards.function import TrainerState
from lightning_rlhf.rollout.assemble import assemble
from lightning_rlhf.rollout.clock import Clock, max_over_ranks, means_over_ranks
from lightning_rlhf.rollout.generation import PendingCompletions
from lightning_rlhf.rollout.sampler import Sampler, Sampling
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.rollout.weights import EngineWeights
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import Completion, ConversationRecord, PromptBatch, Rollout, StepRollout


@dataclass(frozen=True)
class StepRequests:
    """Responses of one step that were requested from the engine.

    Args:
        step: index, from 0, of the step that trains on the responses.
        prompts: N prompts of this rank whose responses were requested.
        sampling: number and kind of the responses to each.
        pending: completions in the order of the prompts.
        scorer: their rewards.
        greedy: greedy responses to the same prompts; None without them.
        given: prompts of this rank whose responses are those of the data; None without them.
        later: prompts of this rank for further rounds of dynamic sampling; None without it.
    """

    step: int
    prompts: PromptBatch
    sampling: Sampling
    pending: PendingCompletions
    scorer: Scorer
    greedy: StepRequests | None = None
    given: PromptBatch | None = None
    later: PromptBatch | None = None

    @property
    def all(self) -> tuple[StepRequests, ...]:
        """These requests and those of greedy responses."""
        return (self,) if self.greedy is None else (self, self.greedy)

    def completions(self) -> list[Completion]:
        """Wait for the completions, without greedy ones, and return them.

        Raises:
            RuntimeError: a completion is missing or invalid, or the engine has ended.
        """
        return self.pending.result()

    @property
    def is_current(self) -> bool:
        """Whether all responses are from the weights that the step starts from; waits for them."""
        return all(completion.policy_version == self.step for completion in self.completions())

    @property
    def interval(self) -> tuple[float, float]:
        """Times of the request and of the last completion, as of ``time.perf_counter``; now if it is unfinished."""
        return self.pending.requested_at, self.pending.finished_at or time.perf_counter()


@dataclass(frozen=True)
class PendingRewards:
    """Rewards of a rollout that are still being computed.

    Args:
        scorer: scorer of the responses, which was launched on the group leader.
        roles: strategy of the run, which knows the leader.
        device: device of reductions over ranks.
        earlier: metrics of other rewards of the step.
    """

    scorer: Scorer
    roles: RoleStrategy
    device: torch.device
    clock: Clock
    earlier: tuple[MetricSums, ...] = ()

    def wait(self, rollout: Rollout) -> tuple[Rollout, MetricSums]:
        """Wait for the rewards; return the rollout with them, and the sums of their metrics. All ranks of a group."""
        with self.clock("time/reward_s"):
            scored = self.roles.run_on_group_leader(self.scorer.results)
        return self.scorer.add_rewards(rollout, scored), scored.metrics

    def result(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Wait for the rewards; return the rollout with them, and the metrics of the step's rewards. All ranks."""
        rollout, sums = self.wait(rollout)
        seconds = {"time/reward_s": self.clock.seconds["time/reward_s"]}
        slowest = max_over_ranks(seconds, self.roles.data_ranks, self.device)
        return rollout, {**slowest, **reward_metrics((*self.earlier, sums), self.roles)}


def reward_metrics(sums: tuple[MetricSums, ...], roles: RoleStrategy) -> dict[str, float]:
    """Return the metrics of reward functions over all ranks; ranks with the same data count once. All ranks."""
    return means_over_ranks(sums if roles.is_group_leader else [])


@dataclass(frozen=True)
class SampledRollout(StepRollout):
    """Rollout of a step with its requests and metrics.

    Args:
        requests: all requests of the step, those of rows that are not trained on included.
        reward_sums: metrics of the reward functions that are known.
        metrics: metrics of a source, over all ranks.
        unused: responses that were generated and rewarded, but are not trained on; None without any.
    """

    rewards: PendingRewards | None = None
    requests: tuple[StepRequests, ...] = ()
    reward_sums: tuple[MetricSums, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    unused: Rollout | None = None

    def scored(self) -> SampledRollout:
        """Wait for pending rewards; return the rollout with them. All ranks with the same data."""
        if self.rewards is None:
            return self
        rollout, sums = self.rewards.wait(self.rollout)
        return replace(self, rollout=rollout, rewards=None, reward_sums=(*self.reward_sums, sums))


class Source(ABC):
    """Source of rollouts. Between :meth:`request` and :meth:`collect` of a step, the next steps may be requested."""

    @abstractmethod
    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        """Request the responses of a step.

        Args:
            prompts: prompts of this rank.
            step: index, from 0, of the step that trains on the responses.
            in_background: whether the engine begins now, while the caller continues.
        """

    @abstractmethod
    def collect(self, requests: StepRequests) -> SampledRollout:
        """Wait for the responses and launch their rewards; return the rollout, whose rewards may be pending."""


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
        requests = self.source.request(prompts, step)
        sampled = self.source.collect(requests)
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
    """

    sampler: Sampler
    sampling: Sampling
    executor: RewardExecutor
    weights: EngineWeights
    roles: RoleStrategy
    progress: Callable[[int, PromptBatch], TrainerState]
    clock: Clock

    @override
    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        sampler = self.sampler
        scorer = Scorer(
            prompts,
            self.executor,
            sampler.tokenizer,
            samples=self.sampling.samples,
            state=self.progress(step, prompts),
            environment=sampler.environment,
        )
        pending = sampler.sample(
            prompts,
            self.sampling,
            step,
            self.weights.version,
            on_finished=scorer.add if self.roles.is_group_leader else None,
            in_background=in_background,
        )
        return StepRequests(step, prompts, self.sampling, pending, scorer)

    @override
    def collect(self, requests: StepRequests) -> SampledRollout:
        with self.clock("time/generate_s"):
            completions = requests.completions()

        def launch() -> Rollout:
            requests.scorer.launch(completions)
            sampling, environment = self.sampling, self.sampler.environment
            return assemble(requests.prompts, completions, sampling.temperature, environment, sampling.limits)

        with self.clock("time/reward_s"):
            rollout = self.roles.run_on_group_leader(launch)
        rewards = PendingRewards(requests.scorer, self.roles, self.weights.device, self.clock)
        return SampledRollout(rollout, rewards=rewards, requests=(requests,))


def conversations_of(requests: Iterable[StepRequests]) -> dict[int, ConversationRecord]:
    """Return the records of the sampled conversations of a step, by their position among all responses."""
    records = {}
    for request in requests:
        if request.sampling.temperature == 0:  # greedy responses, which are baselines
            continue
        samples = request.sampling.samples
        positions = [prompt.position * samples + k for prompt in request.prompts for k in range(samples)]
        for position, completion in zip(positions, request.completions(), strict=True):
            if completion.conversation is not None:
                records[position] = completion.conversation
    return records
