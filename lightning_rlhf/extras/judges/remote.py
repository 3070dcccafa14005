"""Rewards from a reward model on a server."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.image_parts import openai_messages
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import MissingFileError, RunError, UsageError
from lightning_rlhf.extras.judges.endpoint import Client, Endpoint, Request, estimated_tokens
from lightning_rlhf.extras.judges.judge import as_text, images_in
from lightning_rlhf.extras.rewards.scored_text import scored_ids
from lightning_rlhf.models.checks import stored_file
from lightning_rlhf.models.score_heads import scale_of


@dataclass(frozen=True)
class Scored:
    """A response to score, as a reward function receives it.

    Args:
        prompt: text or chat messages.
        response: response in the same form.
        truth: correct answer; None without one.
        images: images of the prompt.
        finished: whether the response ended, and was not cut.
        end_token: text of the token that ended it, empty without one; None if it is not known.
    """

    prompt: Any
    response: Any
    truth: Any = None
    images: Sequence[EncodedImage] = ()
    finished: bool = True
    end_token: str | None = None


class _ServedReward(ABC):
    """Requests the reward of each completion; subclasses define the request and read the reward from the reply."""

    per_sample = True
    dry_call = False

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = Client(endpoint)

    @abstractmethod
    def body(self, row: Scored) -> dict[str, Any]:
        """Build the JSON of a request."""

    @abstractmethod
    def reward(self, reply: Any) -> Any:
        """Return the reward in a reply; may raise KeyError, IndexError or TypeError."""

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        ground_truth: list[Any] | None = None,
        images: list[Any] | None = None,
        finished: list[bool] | None = None,
        end_tokens: list[str] | None = None,
    ) -> list[float]:
        """Request one number per completion.

        Args:
            prompts: texts or chat messages.
            completions: responses in the same form.
            ground_truth: correct answers, for servers that use them.
            images: images of each prompt, None for one without; by default those in the messages of the prompts.
            finished: False for a completion that was cut; None: all ended.
            end_tokens: text of the token that ended each completion.

        Raises:
            RuntimeError: no reply, or a reply without a finite number.
        """
        count = len(completions)
        columns: list[list[Any]] = [
            prompts, completions, ground_truth or [None] * count, images or list(map(images_in, prompts)),
            finished or [True] * count, end_tokens or [None] * count,
        ]  # fmt: skip
        return list(await asyncio.gather(*(self._request(Scored(*row)) for row in zip(*columns, strict=True))))

    def close(self) -> None:
        """Close the connections; another call opens new ones."""
        self.client.close()

    async def _request(self, row: Scored) -> float:
        row = replace(row, images=row.images or ())
        tokens = estimated_tokens(as_text(row.prompt) + as_text(row.response), row.images) + 1
        reply = await self.client.post(Request(self.body(row), tokens))
        try:
            reward = self.reward(reply)
        except (KeyError, IndexError, TypeError):
            reward = None
        if not isinstance(reward, Real) or isinstance(reward, bool):
            raise RunError(f"no reward in the reply of {self.client.endpoint}: {self.client.shown(reply)!r}")
        try:
            value = float(reward)
        except OverflowError:  # an integer of hundreds of digits
            value = math.inf
        if not math.isfinite(value):
            raise RunError(f"{self.client.endpoint} answered a reward of {value}, expected a finite number")
        return value


class RemoteReward(_ServedReward):
    """Gets rewards from a server with OpenRLHF's protocol for remote reward models.

    Your server replies to ``{"query": [prompt + response], "prompts": [prompt], "labels": [ground truth]}`` with
    ``{"rewards": [number]}``. As in OpenRLHF, the query of a finished response ends with the policy's end token,
    because its reward models read the score there. If a prompt contains images, the request also contains
    ``"images": [["data:image/png;base64,...", ...]]``, and ``<image>`` in the prompt stands for each.

    Args:
        endpoint: server and request limits.
        end_token: text that ends a finished response, empty for none. None is the end token of the run's tokenizer.
    """

    def __init__(self, endpoint: Endpoint, end_token: str | None = None) -> None:
        super().__init__(endpoint)
        self.end_token = end_token

    def body(self, row: Scored) -> dict[str, Any]:
        """Build a query.

        Raises:
            ValueError: the protocol does not support chat messages, or the end token is not known.
        """
        if not isinstance(row.prompt, str) or not isinstance(row.response, str):
            raise UsageError("RemoteReward sends text: remove messages: true")
        end = row.end_token if self.end_token is None else self.end_token
        if end is None and row.finished:
            raise UsageError(
                "RemoteReward does not know the token that ends a response, at which OpenRLHF's reward models read the "
                "score, because these responses come without a tokenizer: set end_token, for example '</s>', or '' for "
                "a server that adds it"
            )
        text = row.response
        if row.finished and end and not text.endswith(end):
            text += end
        query = {"query": [row.prompt + text], "prompts": [row.prompt], "labels": [row.truth]}
        return {**query, "images": [[image.data_url() for image in row.images]]} if row.images else query

    def reward(self, reply: Any) -> Any:
        """Return the first reward."""
        return reply["rewards"][0]


class VLLMReward(_ServedReward):
    """Scores with a reward model that you serve by ``vllm serve``, through its ``/classify`` or ``/pooling`` route.

    The text is tokenised here, as :class:`.LearnedReward` does, because a server adds no end token. Requests contain
    token ids. The score is normalised by mean and deviation in the model's ``config.json``. If the reply contains
    several numbers, the last one is used (last class, last token). Prompts with images are sent as messages, and the
    server formats them. For these, set ``messages: true``.

    Args:
        endpoint: server and request limits.
        model: name of the model on the server.
        tokenizer: directory or hub id of the reward model. None is ``model``, the name that ``vllm serve`` gives it.
        activation: whether the server applies its activation, such as a sigmoid, to the score.
    """

    reads_images_in_messages: ClassVar[bool] = True

    def __init__(self, endpoint: Endpoint, model: str, tokenizer: str | None = None, activation: bool = False) -> None:
        super().__init__(endpoint)
        self.model = model
        self.tokenizer = tokenizer or model
        self.activation = activation

    @cached_property
    def _loaded(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the reward model."""
        try:
            return load_tokenizer(self.tokenizer)
        except (UsageError, MissingFileError) as error:
            raise UsageError(
                f"VLLMReward appends the end token of the reward model, but cannot read its tokenizer: {error}; set "
                f"tokenizer to the directory or hub id of {self.model!r}"
            ) from error

    @cached_property
    def _scale(self) -> tuple[float, float]:
        """Mean and deviation of the scores in ``config.json``; 0 and 1 without them."""
        file = None if self.activation else stored_file(self.tokenizer, "config.json")
        config = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        return scale_of(config, self.tokenizer)

    def body(self, row: Scored) -> dict[str, Any]:
        """Build a request with token ids, or with messages that have images.

        Raises:
            ValueError: the prompt is a text with images.
        """
        request = {"model": self.model, "use_activation": self.activation}
        if row.images and isinstance(row.prompt, str):
            raise UsageError("VLLMReward sends images in messages: set messages: true")
        if row.images:
            return {**request, "messages": openai_messages([*row.prompt, *row.response])}
        return {**request, "input": scored_ids(self._loaded, row.prompt, row.response, row.finished, self.tokenizer)}

    def reward(self, reply: Any) -> Any:
        """Return the last number of the first result, normalised."""
        first = reply["data"][0]
        value = first["probs"] if "probs" in first else first["data"]
        while isinstance(value, list):
            value = value[-1]
        mean, std = self._scale
        if not isinstance(value, Real) or isinstance(value, bool):
            return None
        return (float(value) - mean) / std
