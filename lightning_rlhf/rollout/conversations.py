"""Conversations of a policy with the environment of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.calls.references import as_function
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.environments.bridges import Bridge
from lightning_rlhf.environments.host import Host
from lightning_rlhf.environments.hosts import make_host
from lightning_rlhf.environments.protocol import Environment
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.seeding import derive_seed, run_seed
from lightning_rlhf.rollout.conversation_loop import ConversationLoop, ConversationRequest
from lightning_rlhf.rollout.engine import RolloutEngine
from lightning_rlhf.rollout.generation import CompletionCheck, OnFinished, PendingCompletions, serve
from lightning_rlhf.rollout.sampler import ResponseSampler, Sampling
from lightning_rlhf.types import Completion, PromptBatch, SamplingParams

log = logging.getLogger(__name__)


class ConversationSampler:
    """Generates conversations with the environment of a run; see :func:`.generation.serve`.

    Args:
        settings: environment and its limits.
        bridge: conversion of the environment's messages to tokens.
        tokenizer: tokenizer that decodes turns.
    """

    def __init__(self, settings: EnvironmentSettings, bridge: Bridge, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self._bridge = bridge
        self._tokenizer = tokenizer
        self._host: Host | None = None
        self._agents: Any = None  # an Agents of the extra agents

    @property
    def host(self) -> Host:
        """Host of the environments; started when it is first used, and again after :meth:`close`."""
        if self._host is None:
            settings = self.settings
            self._host = make_host(settings.spec, settings.timeout_s, settings.concurrency)
        return self._host

    def close(self) -> None:
        """End the environments, their processes, the endpoint of agents and the parser."""
        if self._host is not None:
            self._host.close()
        if self._agents is not None:
            self._agents.close()
        if self.settings.parser is not None:
            self.settings.parser.close()
        self._host = None
        self._agents = None

    def requests(
        self, prompts: PromptBatch, purpose: str, samples: int, sampling: SamplingParams
    ) -> list[ConversationRequest]:
        """Return the requests of ``samples`` conversations for each prompt, with their seeds.

        The first turn of a conversation has the seed of a response without an environment.

        Args:
            prompts: prompts of this rank.
            purpose: purpose of the conversations, from which their seeds are derived: ``train`` or ``validation``.
            samples: conversations per prompt.
            sampling: sampling parameters, whose ``max_tokens`` limits the tokens after the prompt.
        """
        run = run_seed()
        epoch = prompts.epoch if purpose == "train" else 0
        later_turns = range(1, self.settings.max_turns)

        def seed(*parts: int) -> int:
            return derive_seed(run, purpose, epoch, *parts)

        return [
            ConversationRequest(
                prompt=prompt,
                seed=derive_seed(run, "environment", purpose, epoch, prompt.index),
                turn_seeds=(seed(prompt.index, k), *(seed(prompt.index, k, turn) for turn in later_turns)),
                sampling=sampling,
            )
            for prompt in prompts
            for k in range(samples)
        ]

    def __call__(
        self,
        engine: RolloutEngine,
        requests: Sequence[ConversationRequest],
        on_finished: OnFinished | None,
        check: CompletionCheck,
    ) -> list[Completion]:
        """Generate the conversations of some requests.

        Args:
            engine: engine that generates the turns.
            requests: at least one request.
            on_finished: callback with the index of a request and its conversation as soon as it has ended.
            check: validation of each turn.

        Raises:
            EngineDied: the engine has ended.
            RuntimeError: an environment failed and ``on_error`` is ``raise``, or too many failed; a turn is invalid.
        """
        parts = (self.settings, self.host, engine, on_finished, check, self._bridge, self._tokenizer)
        if self.settings.is_agent:
            if self._agents is None:
                self._agents = the_offered("agents")()
            return list(self._agents.run(requests, *parts))
        return ConversationLoop(*parts).run(requests)


@dataclass(frozen=True)
class EnvironmentSampler(ResponseSampler):
    """Samples conversations of the policy with the environment of a run.

    Args:
        conversations: conversations with the environment.
    """

    conversations: ConversationSampler

    @property
    def environment(self) -> EnvironmentSettings | None:
        """Settings of the environment."""
        return self.conversations.settings

    def _requested(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        check: CompletionCheck,
        on_finished: OnFinished | None,
        in_background: bool,
    ) -> PendingCompletions:
        parameters = self.parameters(sampling)
        requests = self.conversations.requests(prompts, sampling.purpose, sampling.samples, parameters)
        handle = partial(self.conversations, check=check)
        begin = partial(serve, self.engine, requests, handle, check.before(on_finished))
        if in_background:
            return begin()
        return PendingCompletions(lambda: begin().result())

    def close(self) -> None:
        """End the environments."""
        self.conversations.close()


def conversation_sampler(settings: EnvironmentSettings, data: PromptDataModule) -> ConversationSampler:
    """Return the sampler of conversations with the prompts of a data module.

    Args:
        settings: environment of the run.
        data: data module that was set up.

    Raises:
        ValueError: the tokenizer, its chat template or the parser do not allow conversations, or prompts are plain
            text and the bridge continues chats.
    """
    bridge = settings.make_bridge(data.tokenizer, data.chat_template_kwargs)
    if settings.max_images:
        data.use_further_images(settings.max_images)
    if data.image_store is not None:
        bridge.read_images(data.image_store.processor, writes_images=settings.max_images > 0)
    settings.check_parser(data.tokenizer)
    if (
        settings.bridge != "plain"
        and not settings.is_agent
        and not all(example.messages for examples in data.examples.values() for example in examples)
    ):
        raise UsageError(
            f"the environment continues chats (bridge: {settings.bridge}), but prompts of the data are plain text: set "
            f"as_messages: true of the data module, or bridge: plain"
        )
    _check_prompts_end(settings, data)
    if settings.schemas and not data.tools and "tools" in str(data.tokenizer.chat_template):
        log.info(
            "The environment has tools, but the data module has none, so only prompts of rows with a column tools "
            "describe them to the policy: set tools of the data module to describe them in all prompts."
        )
    return ConversationSampler(settings, bridge, data.tokenizer)


def _check_prompts_end(settings: EnvironmentSettings, data: PromptDataModule) -> None:
    """Check that no prompt ends within a message of the assistant, which a conversation could not render again.

    Raises:
        UsageError: a prompt does.
    """
    prompts = [example.messages for examples in data.examples.values() for example in examples if example.messages]
    is_continued = settings.bridge != "plain" and not settings.is_agent and not _has_reset(settings)
    if is_continued and any(messages[-1]["role"] == "assistant" for messages in prompts):
        raise UsageError(
            f"a prompt ends with words of the assistant, which an environment cannot continue with bridge: "
            f"{settings.bridge}: remove them, or set bridge: plain"
        )


def _has_reset(settings: EnvironmentSettings) -> bool:
    """Return whether the environment has a reset of its own, which can write the messages after those of a prompt."""
    reset = getattr(as_function(settings.factory), "reset", None)
    return reset not in (None, Environment.reset)
