"""Rewards from a reward model on a server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

from lightning_rlhf.rewards.endpoint import Client, Endpoint, Question
from lightning_rlhf.rewards.judge import as_text


class _ServedReward(ABC):
    """Asks a server about each completion; subclasses say how it is asked and where its answer has the reward."""

    per_sample = True
    dry_call = False

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = Client(endpoint)

    @abstractmethod
    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """The question as JSON."""

    @abstractmethod
    def reward(self, answer: Any) -> Any:
        """What the answer has where the reward should be; may raise KeyError, IndexError or TypeError."""

    async def __call__(
        self, prompts: list[Any], completions: list[Any], ground_truth: list[Any] | None = None
    ) -> list[float]:
        """One number per completion.

        Args:
            prompts: text, or chat messages.
            completions: likewise.
            ground_truth: for servers that want it.

        Raises:
            RuntimeError: no answer, or one without a number.
        """
        truths = ground_truth or [None] * len(completions)
        rows = zip(prompts, completions, truths, strict=True)
        return list(await asyncio.gather(*(self._ask(*row) for row in rows)))

    def close(self) -> None:
        """End the connections; another call opens new ones."""
        self.client.close()

    async def _ask(self, prompt: Any, response: Any, truth: Any) -> float:
        size = len(as_text(prompt)) + len(as_text(response))
        answer = await self.client.ask(Question(self.body(prompt, response, truth), size // 4 + 1))
        try:
            found = self.reward(answer)
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, Real) or isinstance(found, bool):
            raise RuntimeError(f"no reward in the answer of {self.client.endpoint.url}: {str(answer)[:200]!r}")
        return float(found)


class RemoteReward(_ServedReward):
    """The reward that a server gives, asked as OpenRLHF asks its remote reward models.

    ``{"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}`` is answered by
    ``{"rewards": [number]}``.

    Args:
        endpoint: where to ask, and how much.
    """

    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """One query.

        Raises:
            ValueError: chat messages, which this protocol does not know.
        """
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise ValueError("RemoteReward sends text: leave out messages: true")
        return {"query": [prompt + response], "prompts": [prompt], "labels": [truth]}

    def reward(self, answer: Any) -> Any:
        """The first of the rewards."""
        return answer["rewards"][0]


class VLLMReward(_ServedReward):
    """The score of a reward model that ``vllm serve`` runs, by its ``/classify`` or ``/pooling`` route.

    Of several numbers the last counts: that of the last class, and of the last token. ``/classify`` squashes a score
    unless the server is told not to (``--pooler-config '{"use_activation": false}'``).

    Args:
        endpoint: where to ask, and how much.
        model: name that the server knows.
    """

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        super().__init__(endpoint)
        self.model = model

    def body(self, prompt: Any, response: Any, truth: Any) -> dict[str, Any]:
        """A text, or a conversation that the server puts into the reward model's own template."""
        if isinstance(prompt, str):
            return {"model": self.model, "input": prompt + as_text(response)}
        return {"model": self.model, "messages": [*prompt, *response]}

    def reward(self, answer: Any) -> Any:
        """The last number of the first result."""
        first = answer["data"][0]
        found = first["probs"] if "probs" in first else first["data"]
        while isinstance(found, list):
            found = found[-1]
        return found
