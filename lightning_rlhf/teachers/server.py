"""A teacher on vLLM servers, which return the most likely tokens at each position of given texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.calls.loop import EventLoopThread
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rewards.endpoint import Client, Endpoint, Request
from lightning_rlhf.types import Rollout, TopTokens

log = logging.getLogger(__name__)
_COMPARED_TOKENS = 64  # tokens whose texts are compared with those of the run's tokenizer
_TRIES_BEFORE_THE_RUN = 3
_HEARTBEAT_SECONDS = 60


@dataclass(frozen=True)
class TeacherServer:
    """A teacher on one or more vLLM servers with the same model, between which the texts are distributed.

    Start each with ``vllm serve MODEL --max-logprobs K``, where K is at least ``top_k`` of the divergence. A text goes
    to the server with the fewest unfinished texts, and responses to one prompt to the same server. It is sent again
    after a connection error or a timeout, so that a server may be restarted while the run waits or uses the others.

    Args:
        urls: addresses, for example ``http://127.0.0.1:8000``; at least one.
        model: name of the model on the servers; None asks the first one, which must have a single model.
        key_env: name of the environment variable with the servers' key; None sends no key.
        timeout_s: time limit of one try, seconds.
        tries: largest number of times that a text is sent, at least 1, with pauses of up to 30 s: about 4 minutes in
            which a server may be restarted.
        concurrency: largest number of concurrent requests, for each server; others also get those of one that fails.
    """

    urls: Sequence[str]
    model: str | None = None
    key_env: str | None = None
    timeout_s: float = 600.0
    tries: int = 20
    concurrency: int = 32
    _loop: EventLoopThread = field(
        default_factory=lambda: EventLoopThread("teacher"), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if isinstance(self.urls, str) or not self.urls:
            raise UsageError(f"urls of a TeacherServer must be a list of at least one address, got {self.urls!r}")
        self._endpoint(list(self.urls), "")  # validates the arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> TeacherServer:
        """Return the same object: averages of a module's weights share its connections."""
        return self

    def _endpoint(self, urls: Sequence[str], route: str, tries: int | None = None) -> Endpoint:
        return Endpoint(
            url=[f"{url.rstrip('/')}{route}" for url in urls],
            key_env=self.key_env,
            timeout_s=self.timeout_s,
            tries=tries or self.tries,
            concurrency=self.concurrency,
        )

    @cached_property
    def _client(self) -> Client:
        return Client(self._endpoint(self.urls, "/v1/completions"))

    @cached_property
    def served_model(self) -> str:
        """Name of the model on the servers.

        Raises:
            RuntimeError: the first server does not answer, or has several models.
        """
        if self.model is not None:
            return self.model
        (reply,) = self._ask(self.urls[0], "/v1/models", [None])
        names = [str(entry.get("id")) for entry in reply.get("data", [])]
        if len(names) != 1:
            raise UsageError(f"{self.urls[0]} serves the models {names}: set model of the TeacherServer to one of them")
        return names[0]

    def check(self, tokenizer: PreTrainedTokenizerBase | None, temperature: float) -> None:
        """Validate that the servers have the run's token ids and can give its log-probabilities.

        Args:
            tokenizer: tokenizer of the run; None compares no tokens.
            temperature: temperature of the sampling.

        Raises:
            ValueError: the temperature is not 1, or a server has other tokens.
            RuntimeError: a server does not answer.
        """
        if temperature != 1:
            raise UsageError(
                f"a TeacherServer returns log-probabilities at temperature 1, but the sampling has {temperature}: set "
                f"temperature of RolloutLoop to 1"
            )
        if tokenizer is None:
            return
        tokens = range(0, len(tokenizer), max(1, len(tokenizer) // _COMPARED_TOKENS))
        for url in self.urls:
            bodies = [{"model": self.served_model, "tokens": [token]} for token in tokens]
            for token, reply in zip(tokens, self._ask(url, "/detokenize", bodies), strict=True):
                ours, theirs = tokenizer.decode([token]), reply.get("prompt")
                if theirs != ours:
                    raise UsageError(
                        f"the teacher at {url} has another tokenizer: token {token} is {theirs!r} there and {ours!r} "
                        f"in the run's"
                    )

    def _ask(self, url: str, route: str, bodies: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Return the replies to some requests before the run; None as body gets the route.

        Raises:
            RuntimeError: the server does not answer, rejects a request, or returns something else than a JSON object.
        """
        client = Client(self._endpoint([url], route, tries=_TRIES_BEFORE_THE_RUN))
        try:
            pending = [self._loop.submit(client.post(Request(body, 0))) for body in bodies]
            replies = [future.result() for future in pending]
        finally:
            client.close()
        if not all(isinstance(reply, dict) for reply in replies):
            raise RunError(f"{client.endpoint} did not return a JSON object: is it a vLLM server?")
        return replies

    def request(self, rollout: Rollout, top_k: int) -> list[Future[TopTokens]]:
        """Request the distributions of the responses of some rows.

        Args:
            rollout: B rows, with the prompts of the teacher.
            top_k: K, number of tokens of each distribution.

        Returns:
            For each row the (T, K) top tokens of its response, T its length.
        """
        prompts = zip(rollout.prompt_ids.tolist(), rollout.prompt_lengths.tolist(), strict=True)
        responses = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
        futures = []
        for (prompt, start), (response, length) in zip(prompts, responses, strict=True):
            tokens = self._top_tokens(self.served_model, prompt[:start], response[:length], top_k=top_k)
            futures.append(self._loop.submit(tokens))
        return futures

    async def _top_tokens(self, model: str, prompt: list[int], response: list[int], top_k: int) -> TopTokens:
        """Return the (T, K) top tokens of a response."""
        body = {
            "model": model,
            "prompt": prompt + response,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        reply = await self._client.post(Request(body, 0, prompt + response))
        url = self._client.endpoint
        try:
            positions = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
            tokens = [sorted(_pairs(entry), reverse=True)[:top_k] for entry in positions]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise RunError(f"{url} returned no log-probabilities of the prompt: is it a vLLM server?") from None
        fewest = min(map(len, tokens), default=0)
        if len(tokens) != len(response) or fewest < top_k:
            raise RunError(
                f"{url} returned {fewest} log-probabilities per token for {len(tokens)} tokens, where {top_k} for "
                f"{len(response)} were requested: start it with --max-logprobs {top_k}"
            )
        logprobs, ids = (torch.tensor([[pair[i] for pair in row] for row in tokens]) for i in range(2))
        return TopTokens.of(ids.long(), logprobs.float())


def _pairs(entry: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return (log-probability, token id) of a position."""
    return [(float(value["logprob"]), int(token)) for token, value in entry.items()]


def results(pending: Sequence[Future[TopTokens]], width: int, count: int) -> TopTokens:
    """Wait for the top tokens of some responses; log a line every minute.

    Args:
        pending: results of :meth:`TeacherServer.request`.
        width: T of the result.
        count: K, number of tokens of each distribution.

    Returns:
        (B, T, K) top tokens, padded with zeros; one row for no response.

    Raises:
        RuntimeError: a server does not answer, or rejects a text.
    """
    waiting = set(pending)
    while waiting:
        done, waiting = wait(waiting, timeout=_HEARTBEAT_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if waiting:
            log.info("Waiting for the teacher's log-probabilities of %d of %d texts.", len(waiting), len(pending))
    shape = max(1, len(pending)), width, count
    total = TopTokens(torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape[:2]))
    for row, future in enumerate(pending):
        tokens = future.result()
        for padded, values in zip(vars(total).values(), vars(tokens).values(), strict=True):
            padded[row, : len(values)] = values
    return total
