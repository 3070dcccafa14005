"""Conversations of a policy with the environment of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.environments.bridges import Bridge
from lightning_rlhf.environments.hosts import Host, make_host
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.rollout.agents import AgentLoop
from lightning_rlhf.rollout.conversation_loop import ConversationLoop, ConversationRequest
from lightning_rlhf.rollout.endpoint import AgentEndpoint
from lightning_rlhf.rollout.engine import CompletionCheck, OnFinished, RolloutEngine
from lightning_rlhf.types import Completion


class ConversationSampler:
    """Generates conversations with the environment of a run; see :meth:`RolloutEngine.serve`.

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
        self._endpoint: AgentEndpoint | None = None

    @property
    def host(self) -> Host:
        """Host of the environments; started when it is first used, and again after :meth:`close`."""
        if self._host is None:
            settings = self.settings
            self._host = make_host(settings.spec, settings.timeout_s, settings.concurrency)
        return self._host

    @property
    def endpoint(self) -> AgentEndpoint:
        """Endpoint of agents; started when it is first used, and again after :meth:`close`."""
        if self._endpoint is None:
            self._endpoint = AgentEndpoint()
        return self._endpoint

    def close(self) -> None:
        """End the environments, their processes and the endpoint."""
        host, endpoint, self._host, self._endpoint = self._host, self._endpoint, None, None
        if host is not None:
            host.close()
        if endpoint is not None:
            endpoint.close()

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
        loop = AgentLoop(self.endpoint, *parts) if self.settings.is_agent else ConversationLoop(*parts)
        return loop.run(requests)


def row_of(columns: Mapping[str, Sequence[Any]], index: int, text: str) -> dict[str, Any]:
    """Return the columns of a prompt's row, with its text as ``prompt``."""
    return {"prompt": text, **{name: values[index] for name, values in columns.items()}}
