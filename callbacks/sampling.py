"""Requests of responses from the engine, and the rollouts of one training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Trainer
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.models.loading import ModelSource, save_architecture
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rewards.executor import MetricSums, RewardExecutor, RolloutRewards
from lightning_rlhf.rewards.function import TrainerState
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.collect import Collector
from lightning_rlhf.rollout.conversation_loop import ConversationRequest
from lightning_rlhf.rollout.conversations import ConversationSampler
from lightning_rlhf.rollout.engine import CompletionCheck, Generation, OnFinished, RolloutEngine
from lightning_rlhf.rollout.vllm.supervisor import remove_temporary_files
from lightning_rlhf.seeding import derive_seed, run_seed
from lightning_rlhf.types import Completion, PromptBatch, Rollout, SamplingParams

from .checks import tensor_ranks
from .clock import Clock, max_over_ranks, means_over_ranks, sum_over_ranks
from .rollout_requests import RequestsAhead, RolloutRequest, covered

log = logging.getLogger(__name__)
# Methods whose overrides may read rewards before RLHFModule.evaluate() has added them.
_READ_REWARDS = ("receive", "pop_rollout", "evaluate", "training_step")


def choose_run_engine(
    choice: RolloutEngine | Literal["auto"], trainer: Trainer, module: RLHFModule, dtype: str, max_tokens: int
) -> RolloutEngine:
    """Return the configured engine, or choose one for this run.

    Args:
        choice: engine of the configuration.
        trainer: trainer of the run.
        module: module with the actor.
        dtype: dtype of the engine's weights.
        max_tokens: longest prompt and response together, in tokens.
    """
    engine, reason = choice, "chosen in the configuration"
    if engine == "auto":
        config = module.sources["actor"].hf_config()
        engine, reason = choose_engine(config, tensor_ranks(trainer, module), dtype, trainer.world_size, max_tokens)
    log.info("Rollouts by %s: %s.", type(engine).__name__, reason)
    return engine


def make_engine_directory(trainer: Trainer, source: ModelSource) -> Path:
    """Return a directory with the actor's configuration for this rank's engine; remove files of ranks that are gone.

    Args:
        trainer: trainer of the run.
        source: source of the actor.
    """
    directory = Path(trainer.default_root_dir) / "engine" / f"rank{trainer.global_rank}"
    save_architecture(source, directory)
    if trainer.is_global_zero:
        remove_temporary_files(directory.parent, trainer.world_size)
    return directory


@dataclass(frozen=True)
class ResponseSampler:
    """Source of responses with the sampling settings of a run.

    Args:
        engine: engine that generates.
        tokenizer: tokenizer that decodes responses for reward functions.
        max_tokens: longest response.
        max_length: longest prompt and response together.
        stop_token_ids: tokens that end a response.
        vocabulary: V, number of tokens of the actor.
        conversations: sampler of conversations with the environment; None without one.
    """

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    max_length: int
    stop_token_ids: tuple[int, ...]
    vocabulary: int
    conversations: ConversationSampler | None = None

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Settings of the environment; None without one."""
        return None if self.conversations is None else self.conversations.settings

    def generate(
        self,
        prompts: PromptBatch,
        purpose: Literal["train", "validation"],
        *,
        samples: int,
        temperature: float,
        version: int,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return ``samples`` completions of each prompt, grouped by prompt, each from a different seed.

        Args:
            prompts: prompts of this rank.
            purpose: purpose of the responses, from which their seeds are derived.
            samples: responses per prompt.
            temperature: temperature of the sampling.
            version: version of the policy that was pushed last.
            on_finished: argument of :meth:`RolloutEngine.generate`.
        """
        check = self.check(version)
        sampling = SamplingParams(self.max_tokens, temperature, stop_token_ids=self.stop_token_ids)
        ids = [ids for ids in prompts.token_ids for _ in range(samples)]
        if self.conversations is not None:
            requests = self.conversations.requests(prompts, purpose, samples, sampling)
            return self._converse(requests, check, on_finished).completions()
        seeds = self.seeds(prompts, purpose, samples)
        completions = self.engine.generate(ids, sampling, seeds, check.before(on_finished))
        check.check_all(completions, len(ids))
        return completions

    def _converse(
        self, requests: Sequence[ConversationRequest], check: CompletionCheck, on_finished: OnFinished | None
    ) -> Generation:
        """Start conversations."""
        assert self.conversations is not None
        handle = partial(self.conversations, check=check)
        generation = self.engine.serve(requests, handle, check.before(on_finished))

        def checked() -> list[Completion]:
            check.check_all(generation.completions(), len(requests))
            return generation.completions()

        return Generation(checked, generation)

    def submit(
        self, prompts: PromptBatch, *, samples: int, temperature: float, version: int, on_finished: OnFinished | None
    ) -> Generation:
        """Start to generate training responses; arguments and completions as of :meth:`generate`."""
        check = self.check(version)
        sampling = SamplingParams(self.max_tokens, temperature, stop_token_ids=self.stop_token_ids)
        if self.conversations is not None:
            requests = self.conversations.requests(prompts, "train", samples, sampling)
            return self._converse(requests, check, on_finished)
        ids = [ids for ids in prompts.token_ids for _ in range(samples)]
        seeds = self.seeds(prompts, "train", samples)
        generation = self.engine.submit(ids, sampling, seeds, check.before(on_finished))

        def checked() -> list[Completion]:
            check.check_all(generation.completions(), len(ids))
            return generation.completions()

        return Generation(checked, generation)

    def close(self) -> None:
        """End the environments."""
        if self.conversations is not None:
            self.conversations.close()

    def check(self, version: int) -> CompletionCheck:
        """Return the validation of completions that are requested after a push of this version."""
        return CompletionCheck(self.max_tokens, version, self.vocabulary, self.engine.mixes_versions)

    def seeds(self, prompts: PromptBatch, purpose: str, samples: int) -> list[int]:
        """Return the seed of each response; validations have the same seeds every time."""
        epoch = prompts.epoch if purpose == "train" else 0
        return [derive_seed(run_seed(), purpose, epoch, i, k) for i in prompts.indices for k in range(samples)]


@dataclass
class StepRollouts:
    """Rollouts for the training steps, with the tokens and reward metrics of the current step.

    Args:
        sampler: source of responses.
        executor: executor of the reward functions.
        ahead: requests for later steps.
        trainer: trainer of the run.
        module: module of the run.
        clock: clock of the current step.
        requests: requests for the current step.
        scoring: request, and the function that waits for its rewards, while they are computed; the list is empty except
            on the group leader.
        reward_metrics: metrics of the reward functions in the current step.
    """

    sampler: ResponseSampler
    executor: RewardExecutor
    ahead: RequestsAhead
    trainer: Trainer
    module: RLHFModule
    clock: Clock = field(default_factory=Clock)
    requests: list[RolloutRequest] = field(default_factory=list)
    scoring: tuple[RolloutRequest, list[Callable[[], RolloutRewards]]] | None = None
    reward_metrics: list[MetricSums] = field(default_factory=list)

    def request(
        self, prompts: PromptBatch, samples: int, temperature: float, *, version: int, step: int | None = None
    ) -> RolloutRequest:
        """Request responses. All ranks that share an engine.

        Args:
            prompts: prompts of this rank.
            samples: responses per prompt.
            temperature: temperature of the sampling.
            version: version of the policy that was pushed last.
            step: later step that trains on the responses, which are then generated while the trainer continues; None
                for the current step.
        """
        is_ahead = step is not None
        step = self.trainer.global_step if step is None else step
        state = TrainerState(step, self.trainer.max_steps, float(prompts.epoch))
        collector = Collector(
            prompts,
            self.executor,
            self.sampler.tokenizer,
            size=samples,
            state=state,
            environment=self.sampler.environment,
        )
        stored = self.ahead.restored(step, prompts, samples, temperature)
        on_finished = collector.add if self.module.role_strategy.is_group_leader else None
        submit = partial(
            self.sampler.submit,
            prompts,
            samples=samples,
            temperature=temperature,
            version=version,
            on_finished=on_finished,
        )
        if stored is not None:
            generation = Generation(lambda: stored)
        elif is_ahead:
            generation = submit()
        else:
            generation = Generation(partial(self.sampler.generate, prompts, "train", **submit.keywords))
        self.ahead.track(generation)
        return RolloutRequest(
            step=step,
            prompts=prompts,
            samples=samples,
            temperature=temperature,
            generation=generation,
            collector=collector,
            is_ahead=is_ahead or stored is not None,
            is_restored=stored is not None,
        )

    @property
    def are_current(self) -> bool:
        """Whether all responses of the step are from the weights that it starts from. The same on all ranks."""
        return not any(request.is_ahead for request in self.requests)

    def rollout(
        self, prompts: PromptBatch, samples: int, temperature: float, version: int, overlap: bool = False
    ) -> Rollout:
        """Return the rollout of some prompts, from :attr:`requests` or a new request. All ranks that share an engine.

        Args:
            prompts: prompts of this rank.
            samples: responses per prompt.
            temperature: temperature of the sampling.
            version: version of the policy that was pushed last.
            overlap: whether the module may evaluate the rollout while rewards are computed, which :meth:`score` adds.
        """
        wanted = prompts.indices, samples, temperature
        known = [own for own in self.requests if (own.prompts.indices, own.samples, own.temperature) == wanted]
        if not known:
            known = [self.request(prompts, samples, temperature, version=version)]
            self.requests += known
        request = known[0]
        with self.clock("time/generate_s"):
            self.ahead.wait([request])
        with self.clock("time/reward_s"):  # rewards that were not computed during generation
            if overlap and self.executor.overlaps and not self.module.replaces(*_READ_REWARDS):
                waits: list[Callable[[], RolloutRewards]] = []

                def begin() -> Rollout:
                    unscored, finish = request.unscored_rollout()
                    waits.append(finish)
                    return unscored

                self.scoring = request, waits
                return self.module.role_strategy.run_on_group_leader(begin)
            rollout, scored = self.module.role_strategy.run_on_group_leader(request.rollout)
        self.reward_metrics.append(scored.metrics)
        return rollout

    def score(self, rollout: Rollout) -> Rollout:
        """Wait for the rewards of :attr:`scoring`, add them to the rollout and log their metrics. All ranks.

        Args:
            rollout: rollout of the step, on the module's device.
        """
        assert self.scoring is not None
        request, waits = self.scoring
        with self.clock("time/reward_s"):
            scored = self.module.role_strategy.run_on_group_leader(lambda: waits[0]())
        waited = {"time/reward_s": self.clock.seconds["time/reward_s"]}
        metrics = max_over_ranks(waited, self.module.data_ranks, self.module.device)
        self.reward_metrics.append(scored.metrics)
        self.module.log_step("rewards", metrics | self._means())
        return request.collector.with_rewards(rollout, scored)

    def _means(self) -> dict[str, float]:
        """Return the metrics of the reward functions over all ranks; ranks with the same data count once."""
        return means_over_ranks(self.reward_metrics if self.module.role_strategy.is_group_leader else [])

    def metrics(self, rollout: Rollout, max_staleness: int) -> dict[str, float]:
        """Return times, speed, staleness and reward metrics of the step over all ranks. All ranks.

        Args:
            rollout: rollout of the step.
            max_staleness: largest allowed difference of the step and the version of a token.

        Raises:
            RuntimeError: a token is from older weights than allowed.
        """
        ranks, device = self.module.data_ranks, self.module.device
        tokens = sum(len(each.token_ids) for request in self.requests for each in request.completions())
        largest = {**self.clock.seconds, "generation": self.clock.seconds["time/generate_s"]}
        if self.scoring is not None:
            largest.pop("time/reward_s", None)  # score() logs it, and the metrics of the rewards
        if not self.are_current:
            largest["generation"] = covered([request.interval for request in self.requests], -inf, inf)
        summed = {"tokens": float(tokens)}
        if max_staleness:
            staleness = self.trainer.global_step - rollout.policy_version[rollout.response_mask].double()
            largest["rollout/staleness_max"] = float(staleness.max())
            summed |= {"staleness": float(staleness.sum()), "trained": float(len(staleness))}
        metrics = max_over_ranks(largest, ranks, device)  # all ranks wait for the slowest
        total = sum_over_ranks(summed, ranks, device)
        seconds = metrics.pop("generation")
        if not any(request.is_restored for request in self.requests):  # their seconds are not known
            metrics["rollout/tokens_per_s"] = total["tokens"] / seconds
        if max_staleness:
            metrics["rollout/staleness_mean"] = total["staleness"] / total["trained"]
            if metrics["rollout/staleness_max"] > max_staleness:
                raise RunError(
                    f"a token is from weights that are {metrics['rollout/staleness_max']:g} steps old, more than "
                    f"max_staleness {max_staleness} allows"
                )
        return metrics | (self._means() if self.scoring is None else {})

    def any_rank(self, needs_more: bool) -> bool:
        """Return whether any rank that shares the engine needs another round; then all of them generate."""
        ranks = self.module.data_ranks
        if self.sampler.engine.ranks <= tensor_ranks(self.trainer, self.module):
            return needs_more
        return bool(ranks.max(torch.tensor(float(needs_more), device=self.module.device)))
