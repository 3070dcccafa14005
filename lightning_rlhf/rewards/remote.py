"""Rewards from a reward model on a server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rewards.endpoint import Client, Endpoint, Request
from lightning_rlhf.rewards.judge import as_text


class _ServedReward(ABC):
    """Requests the reward of each completion; subclasses define the request and read the reward from the reply."""

    per_sample = True
    dry_call = False

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = Client(endpoint)

    @abstractmethod
    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """Build the JSON of a request."""

    @abstractmethod
    def reward(self, reply: Any) -> Any:
        """Return the reward in a reply; may raise KeyError, IndexError or TypeError."""

    async def __call__(
        self, prompts: list[Any], completions: list[Any], ground_truth: list[Any] | None = None
    ) -> list[float]:
        """Request one number per completion.

        Args:
            prompts: texts or chat messages.
            completions: responses in the same form.
            ground_truth: correct answers, for servers that use them.

        Raises:
            RuntimeError: no reply, or a reply without a number.
        """
        truths = ground_truth or [None] * len(completions)
        rows = zip(prompts, completions, truths, strict=True)
        return list(await asyncio.gather(*(self._request(*row) for row in rows)))

    def close(self) -> None:
        """Close the connections; another call opens new ones."""
        self.client.close()

    async def _request(self, prompt: Any, response: Any, truth: Any) -> float:
        size = len(as_text(prompt)) + len(as_text(response))
        reply = await self.client.post(Request(self.body(prompt, response, truth), size // 4 + 1))
        try:
            reward = self.reward(reply)
        except (KeyError, IndexError, TypeError):
            reward = None
        if not isinstance(reward, Real) or isinstance(reward, bool):
            raise RunError(f"no reward in the reply of {self.client.endpoint.url}: {str(reply)[:200]!r}")
        return float(reward)


class RemoteReward(_ServedReward):
    """Reward from a server with OpenRLHF's protocol for remote reward models.

    The reply to ``{"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}`` is
    ``{"rewards": [number]}``.

    Args:
        endpoint: server and request limits.
    """

    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """Build a query.

        Raises:
            ValueError: the protocol does not support chat messages.
        """
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError("RemoteReward sends text: remove messages: true")
        return {"query": [prompt + response], "prompts": [prompt], "labels": [truth]}

    def reward(self, reply: Any) -> Any:
        """Return the first reward."""
        return reply["rewards"][0]


class VLLMReward(_ServedReward):
    """Score of a reward model served by ``vllm serve``, through its ``/classify`` or ``/pooling`` route.

    If the reply has several numbers, the last one is used (last class, last token). ``/classify`` applies an activation
    to the score unless the server runs with ``--pooler-config '{"use_activation": false}'``.

    Args:
        endpoint: server and request limits.
        model: name of the model on the server.
    """

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        super().__init__(endpoint)
        self.model = model

    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """Build a request with text, or with messages that the server formats by the reward model's own template."""
        if isinstance(prompt, str):
            return {"model": self.model, "input": prompt + as_text(response)}
        return {"model": self.model, "messages": [*prompt, *response]}

    def reward(self, reply: Any) -> Any:
        """Return the last number of the first result."""
        first = reply["data"][0]
        value = first["probs"] if "probs" in first else first["data"]
        while isinstance(value, list):
            value = value[-1]
        return value
