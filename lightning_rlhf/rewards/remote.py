"""Rewards from a reward model on a server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar

from lightning_rlhf.data.image_parts import openai_messages
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rewards.endpoint import Client, Endpoint, Request, estimated_tokens, start_of_reply
from lightning_rlhf.rewards.judge import as_text, images_in


class _ServedReward(ABC):
    """Requests the reward of each completion; subclasses define the request and read the reward from the reply."""

    per_sample = True
    dry_call = False

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = Client(endpoint)

    @abstractmethod
    def body(self, prompt: Any, response: Any, truth: Any, images: Sequence[EncodedImage] = ()) -> dict[str, Any]:
        """Build the JSON of a request.

        Args:
            prompt: text or chat messages.
            response: response in the same form.
            truth: correct answer; None without one.
            images: images of the prompt.
        """

    @abstractmethod
    def reward(self, reply: Any) -> Any:
        """Return the reward in a reply; may raise KeyError, IndexError or TypeError."""

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        ground_truth: list[Any] | None = None,
        images: list[Any] | None = None,
    ) -> list[float]:
        """Request one number per completion.

        Args:
            prompts: texts or chat messages.
            completions: responses in the same form.
            ground_truth: correct answers, for servers that use them.
            images: images of each prompt, None for one without; by default those in the messages of the prompts.

        Raises:
            RuntimeError: no reply, or a reply without a number.
        """
        truths = ground_truth or [None] * len(completions)
        rows = zip(prompts, completions, truths, images or map(images_in, prompts), strict=True)
        return list(await asyncio.gather(*(self._request(*row) for row in rows)))

    def close(self) -> None:
        """Close the connections; another call opens new ones."""
        self.client.close()

    async def _request(self, prompt: Any, response: Any, truth: Any, images: Sequence[EncodedImage] | None) -> float:
        images = images or ()
        tokens = estimated_tokens(as_text(prompt) + as_text(response), images) + 1
        reply = await self.client.post(Request(self.body(prompt, response, truth, images), tokens))
        try:
            reward = self.reward(reply)
        except (KeyError, IndexError, TypeError):
            reward = None
        if not isinstance(reward, Real) or isinstance(reward, bool):
            raise RunError(f"no reward in the reply of {self.client.endpoint}: {start_of_reply(reply)!r}")
        return float(reward)


class RemoteReward(_ServedReward):
    """Reward from a server with OpenRLHF's protocol for remote reward models.

    The reply to ``{"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}`` is
    ``{"rewards": [number]}``. Requests for prompts with images also have ``"images": [["data:image/png;base64,...",
    ...]]``, and ``<image>`` in the prompt stands for each.

    Args:
        endpoint: server and request limits.
    """

    def body(self, prompt: Any, response: Any, truth: Any, images: Sequence[EncodedImage] = ()) -> dict[str, Any]:
        """Build a query.

        Raises:
            ValueError: the protocol does not support chat messages.
        """
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise UsageError("RemoteReward sends text: remove messages: true")
        query = {"query": [prompt + response], "prompts": [prompt], "labels": [truth]}
        return {**query, "images": [[image.data_url() for image in images]]} if images else query

    def reward(self, reply: Any) -> Any:
        """Return the first reward."""
        return reply["rewards"][0]


class VLLMReward(_ServedReward):
    """Score of a reward model served by ``vllm serve``, through its ``/classify`` or ``/pooling`` route.

    If the reply has several numbers, the last one is used (last class, last token). ``/classify`` applies an activation
    to the score unless the server runs with ``--pooler-config '{"use_activation": false}'``. Images are sent in
    messages, which need ``messages: true``.

    Args:
        endpoint: server and request limits.
        model: name of the model on the server.
    """

    reads_images_in_messages: ClassVar[bool] = True

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        super().__init__(endpoint)
        self.model = model

    def body(self, prompt: Any, response: Any, truth: Any, images: Sequence[EncodedImage] = ()) -> dict[str, Any]:
        """Build a request with text, or with messages that the server formats by the reward model's own template.

        Raises:
            ValueError: the prompt is a text with images.
        """
        if isinstance(prompt, str):
            if images:
                raise UsageError("VLLMReward sends images in messages: set messages: true")
            return {"model": self.model, "input": prompt + as_text(response)}
        return {"model": self.model, "messages": openai_messages([*prompt, *response])}

    def reward(self, reply: Any) -> Any:
        """Return the last number of the first result."""
        first = reply["data"][0]
        value = first["probs"] if "probs" in first else first["data"]
        while isinstance(value, list):
            value = value[-1]
        return value
