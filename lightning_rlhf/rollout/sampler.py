"""Samplers: responses of the engine to prompts, with the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.generation import CompletionCheck, OnFinished, PendingCompletions, generate, submit
from lightning_rlhf.types import NO_LIMITS, Completion, PromptBatch, SamplingLimits, SamplingParams


@dataclass(frozen=True)
class Sampling:
    """Number and kind of the responses to each prompt.

    Args:
        samples: responses per prompt, at least 1.
        temperature: temperature of the sampling; 0 is greedy.
        purpose: purpose of the responses, from which their seeds are derived.
        limits: which tokens can be sampled.
        max_tokens: longest response; None takes that of the sampler.
    """

    samples: int
    temperature: float
    purpose: Literal["train", "validation"] = "train"
    limits: SamplingLimits = NO_LIMITS
    max_tokens: int | None = None


class Sampler(Protocol):
    """Source of responses with the settings of a run."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer that decodes responses for reward functions."""

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Settings of the environment whose conversations the responses are; None without one."""

    def sample(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        step: int,
        version: int,
        on_finished: OnFinished | None = None,
        in_background: bool = False,
    ) -> PendingCompletions:
        """Request responses, grouped by prompt, each from a different seed. All ranks that share an engine.

        Args:
            prompts: prompts of this rank.
            sampling: number and kind of the responses.
            step: number of finished steps before the one that uses the responses.
            version: version of the policy that was pushed last.
            on_finished: callback with the index of a response and the response, as soon as it is finished.
            in_background: whether the engine begins now, while the caller continues; otherwise it begins when the
                caller waits.
        """


@dataclass(frozen=True)
class ResponseSampler:
    """Samples responses of one turn.

    Args:
        engine: engine that generates.
        tokenizer: tokenizer that decodes responses for reward functions.
        max_tokens: longest response.
        max_length: longest prompt and response together.
        stop_token_ids: tokens that end a response.
        vocabulary: V, number of tokens of the actor.
        never_sampled: tokens that are not sampled, such as those that stand for images.
    """

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    max_length: int
    stop_token_ids: tuple[int, ...]
    vocabulary: int
    never_sampled: tuple[int, ...]

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Settings of the environment whose conversations the responses are; None without one."""
        return None

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
        traits = self.engine.traits
        longest = sampling.max_tokens or self.max_tokens
        check = CompletionCheck(longest, version, self.vocabulary, traits.mixes_versions or traits.restarts)
        pending = self._requested(prompts, sampling, check, on_finished, in_background)

        def checked() -> list[Completion]:
            completions = pending.result()
            check.check_all(completions, len(prompts) * sampling.samples)
            return completions

        return PendingCompletions(checked, pending)

    def _requested(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        check: CompletionCheck,
        on_finished: OnFinished | None,
        in_background: bool,
    ) -> PendingCompletions:
        tokens = [prompt.tokens for prompt in prompts for _ in range(sampling.samples)]
        arguments = tokens, self.parameters(sampling), seeds_of(prompts, sampling), check.before(on_finished)
        if in_background:
            return submit(self.engine, *arguments)
        generates_when_read = partial(generate, self.engine, *arguments)
        return PendingCompletions(generates_when_read)

    def parameters(self, sampling: Sampling) -> SamplingParams:
        """Return the sampling parameters of the engine."""
        return SamplingParams(
            sampling.max_tokens or self.max_tokens,
            sampling.temperature,
            sampling.limits,
            stop_token_ids=self.stop_token_ids,
            never_sampled=self.never_sampled,
        )

    def close(self) -> None:
        """End the environments of the sampler, if it has any."""


def seeds_of(prompts: PromptBatch, sampling: Sampling) -> list[int]:
    """Return the seed of each response; validations have the same seeds every time."""
    epoch = prompts.epoch if sampling.purpose == "train" else 0
    run = run_seed()
    samples = range(sampling.samples)
    return [derive_seed(run, sampling.purpose, epoch, prompt.index, k) for prompt in prompts for k in samples]
