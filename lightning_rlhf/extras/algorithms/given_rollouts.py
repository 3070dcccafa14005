"""Responses of the data in place of sampled ones, as demonstrations or for distillation."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from lightning_rlhf.batching.sequences import concatenate
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings
from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.columns import is_unicode, source_of
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.assemble import assemble
from lightning_rlhf.rollout.clock import Clock
from lightning_rlhf.rollout.given_responses import GivenResponses
from lightning_rlhf.rollout.source import SampledRollout, Source, StepRequests
from lightning_rlhf.types import AllowedTokens, Completion, ConversationTokens, PromptBatch, Rollout, SamplingLimits


def check_given(settings: RolloutSettings, responses: GivenResponses, trainer: Any, module: RLHFModule) -> None:
    """Validate that module and data can use given responses.

    Raises:
        ValueError: the module learns from sampled responses only, another feature needs them, or the data lack
            responses.
    """
    if not module.accepts_given_responses:
        raise UsageError(
            f"given_responses is set, but {type(module).__name__} learns from sampled responses only: remove it, "
            f"or use DistillationModule or MixtureModule"
        )
    others = {"teacher_prompt": settings.teacher_prompt, "dynamic_sampling": settings.dynamic_sampling}
    if name := next((name for name, value in others.items() if value is not None), None):
        raise UsageError(f"given_responses and {name} of RolloutLoop cannot be combined: remove one of them")
    if module.advantages.needs_greedy:
        raise UsageError(
            f"{type(module.advantages).__name__} needs a greedy response to each prompt, which prompts with given "
            f"responses do not have: use another estimator"
        )
    longest = sys.maxsize if trainer.fast_dev_run else settings.max_response_tokens
    check_rows(responses, trainer.datamodule, longest)


def check_rows(given: GivenResponses, data: PromptDataModule, max_response_tokens: int) -> None:
    """Validate the sources, and the responses in the training rows.

    Raises:
        ValueError: a source or the column does not exist, or a response is missing, too long or not valid Unicode.
    """
    if isinstance(given.on_policy, dict) and (unknown := sorted(given.on_policy.keys() - set(data.source_names))):
        raise UsageError(
            f"on_policy of given_responses has the source {unknown[0]!r}, but the rows have "
            f"{data.source_names[:8]} in the column source or data_source"
        )
    for number, row in enumerate(data.examples["train"]):
        if given.sampled_fraction(source_of(row.columns)) == 1:
            continue
        text = row.columns.get(given.column)
        if not isinstance(text, str) or not text:
            raise UsageError(
                f"training row {number} has no response in the column {given.column!r}, got {text!r:.80}: set "
                f"column of given_responses to one of {data.column_names}"
            )
        if not is_unicode(text):
            raise UsageError(f"the given response of training row {number} is not valid Unicode: {text!r:.80}")
        tokens = len(ids := data.tokenize(text)) + (not ids or ids[-1] not in data.end_tokens)
        if tokens > max_response_tokens:
            raise UsageError(
                f"the given response of training row {number} has {tokens} tokens with its end token, more than "
                f"max_response_tokens {max_response_tokens}: raise that, or shorten or remove the row"
            )


def given_positions(given: GivenResponses, prompts: PromptBatch) -> list[int]:
    """Return the positions, in a batch, of the prompts whose responses are given."""
    positions = []
    for position, prompt in enumerate(prompts):
        seed = derive_seed(run_seed(), "given", prompts.epoch, prompt.index)  # of 63 bits
        draw = (seed >> 10) / (1 << 53)  # uniform in [0, 1), exact in float64
        if draw >= given.sampled_fraction(source_of(prompt.columns)):
            positions.append(position)
    return positions


def with_given_responses(
    source: Source, given: GivenResponses, settings: RolloutSettings, trainer: Any, clock: Clock
) -> Source:
    """Return a source that adds given responses to the sampled ones."""
    return WithGiven(
        source,
        given,
        trainer.datamodule,
        samples=settings.group_size,
        temperature=settings.temperature,
        limits=settings.limits,
        rewards=list(settings.reward_weights),
        clock=clock,
        has_environment=settings.environment is not None,
        is_agent=settings.environment is not None and settings.environment.is_agent,
    )


@dataclass(frozen=True)
class WithGiven(Source):
    """Adds the given responses to the sampled ones of another source.

    Args:
        sampling: source of the sampled responses, with one request for a step.
        settings: settings that select the prompts with given responses.
        data: data module of the run, which tokenizes responses.
        samples: sampled responses per prompt.
        temperature: temperature of the sampling.
        limits: limits of the sampling; given responses have none.
        rewards: names of all rewards, which given responses do not have.
        has_environment: whether the sampled responses are conversations with an environment.
        is_agent: whether the environment is an agent.
    """

    sampling: Source
    settings: GivenResponses
    data: PromptDataModule
    samples: int
    temperature: float
    limits: SamplingLimits
    rewards: Sequence[str]
    clock: Clock
    has_environment: bool = False
    is_agent: bool = False

    def request(self, prompts: PromptBatch, step: int, in_background: bool = False) -> StepRequests:
        """Request the responses that are not given; see :meth:`Source.request`."""
        given = given_positions(self.settings, prompts)
        sampled = sorted(set(range(len(prompts))) - set(given))
        requests = self.sampling.request(prompts.take(sampled), step, in_background)
        return replace(requests, given=prompts.take(given))

    @override
    def collect(self, requests: StepRequests) -> SampledRollout:
        """Waits for the rewards."""
        assert requests.given is not None
        if not len(requests.prompts):
            # Other ranks may share the engine and its requests, and all ranks must log the same times.
            with self.clock("time/generate_s"):
                requests.completions()
            self.clock.add_name("time/reward_s")
            return SampledRollout(self._given_rollout(requests.given, requests.step), requests=(requests,))
        sampled = self.sampling.collect(requests).scored()
        rollout = replace(sampled.rollout, is_given=torch.zeros_like(sampled.rollout.truncated))
        if len(requests.given):
            given = self._given_rollout(requests.given, requests.step)
            rollout = concatenate([rollout, given.to(rollout.prompt_ids.device)])
        return replace(sampled, rollout=rollout)

    def _given_rollout(self, prompts: PromptBatch, step: int) -> Rollout:
        """Return the given responses to some prompts, at least one, without rewards, on the CPU."""
        completions = []
        for prompt in prompts:
            ids = self.data.tokenize(prompt.columns[self.settings.column])
            if not ids or ids[-1] not in self.data.end_tokens:  # some data include the end token
                ids = [*ids, self._end_of_message if prompt.messages else self._end_of_text]
            completions.append(Completion(ids, [0.0] * len(ids), "stop", step))
        rollout = assemble(prompts, completions, self.temperature)
        missing = torch.full((len(prompts),), math.nan)
        starts = torch.zeros_like(rollout.response_mask) if self.is_agent else None
        conversation = ConversationTokens(torch.zeros(rollout.response_ids.shape), starts)
        return replace(
            rollout,
            rewards=dict.fromkeys(self.rewards, missing),
            reward=missing,
            limits=self.limits,
            allowed=AllowedTokens.every(*rollout.response_ids.shape) if self.limits else None,
            position=rollout.position * self.samples,  # that of the first sampled response that it replaces
            is_given=torch.ones_like(rollout.truncated),
            skipped=torch.zeros_like(rollout.truncated),
            conversation=conversation if self.has_environment else None,
        )

    @cached_property
    def _end_of_text(self) -> int:
        """The token that ends a response to a prompt of plain text."""
        end: int = self.data.tokenizer.eos_token_id
        return end

    @cached_property
    def _end_of_message(self) -> int:
        """The token that ends a response to a prompt of messages."""
        chat = Chat(self.data.tokenizer, self.data.tools, self.data.chat_template_kwargs)
        return chat.end_of_turn() or self._end_of_text
