"""A teacher on vLLM servers, which return the most likely tokens at each position of given texts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.calls.loop import EventLoopThread
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.algorithms.remote_teachers import RemoteTeacher
from lightning_rlhf.extras.judges.endpoint import Client, Endpoint, Request
from lightning_rlhf.types import Rollout, TopTokens

log = logging.getLogger(__name__)
_COMPARED_TOKENS = 64  # tokens whose texts are compared with those of the run's tokenizer
_TRIES_BEFORE_THE_RUN = 3
_MOST_PADDING = 1024  # tokens of a vocabulary that no text has
_ROUNDING = 1e-3  # nats, and relative probability
_MODES = ("raw_logprobs", "processed_logprobs")  # of vLLM's option --logprobs-mode; others return logits


@dataclass(frozen=True)
class TeacherServer(RemoteTeacher):
    """A teacher on one or more vLLM servers with the same model.

    Start each server with ``vllm serve MODEL --max-logprobs K``, where K is at least ``top_k`` of the divergence. The
    CPU build has no command ``vllm``. Use ``python -m vllm.entrypoints.openai.api_server --model MODEL`` with the same
    options there. Leave out ``--logprobs-mode``, or choose one that returns log-probabilities. The servers return
    log-probabilities at temperature 1, so set ``temperature`` of RolloutLoop to 1.

    A text goes to the server with the fewest unfinished texts, and responses to one prompt go to the same server. After
    a connection error or a timeout it is sent again, so you can restart a server while the run waits or uses the
    others. If a server stays away for longer, the run ends and names its address.

    Replies are validated: the tokens must differ, one of them must be the text's own, and their probabilities must sum
    to at most 1. Before the models are loaded, the servers must answer and give 64 tokens the same texts as the run's
    tokenizer does.

    Args:
        urls: addresses, at least one, for example ``http://127.0.0.1:8000``.
        model: name of the model on the servers. None asks the first one, which must serve a single model.
        key_env: environment variable that contains the servers' key. None sends no key.
        timeout_s: time limit of one try, seconds.
        tries: how often a text is sent at most, at least 1, with pauses of up to 30 s. This leaves you about 4 minutes
            to restart a server.
        concurrency: most concurrent requests to each server. If a server fails, the others also get its requests.
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

    @override
    def check(self, tokenizer: PreTrainedTokenizerBase | None, temperature: float) -> None:
        """The temperature must be 1, and the servers must have the run's tokens."""
        if temperature != 1:
            raise UsageError(
                f"a TeacherServer returns log-probabilities at temperature 1, but the sampling has {temperature}: set "
                f"temperature of RolloutLoop to 1"
            )
        if tokenizer is None:
            return
        tokens = range(0, len(tokenizer), max(1, len(tokenizer) // _COMPARED_TOKENS))
        for url in self.urls:
            self._check_mode(url)
            bodies = [{"model": self.served_model, "tokens": [token]} for token in tokens]
            for token, reply in zip(tokens, self._ask(url, "/detokenize", bodies), strict=True):
                ours, theirs = tokenizer.decode([token]), reply.get("prompt")
                if theirs != ours:
                    raise UsageError(
                        f"the teacher at {url} has another tokenizer: token {token} is {theirs!r} there and {ours!r} "
                        f"in the run's"
                    )

    def _check_mode(self, url: str) -> None:
        """Raise if a server returns logits in place of log-probabilities; only some servers return their mode."""
        try:
            (reply,) = self._ask(url, "/server_info?config_format=json", [None])
            mode = reply["vllm_config"]["model_config"]["logprobs_mode"]
        except (RunError, KeyError, TypeError):
            return
        if mode not in _MODES:
            raise UsageError(f"the teacher at {url} has --logprobs-mode {mode}, expected one of {', '.join(_MODES)}")

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

    @override
    def request(self, rollout: Rollout, top_k: int, vocabulary: int | None = None) -> list[Future[TopTokens]]:
        prompts = zip(rollout.prompt_ids.tolist(), rollout.prompt_lengths.tolist(), strict=True)
        responses = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
        futures = []
        for (prompt, start), (response, length) in zip(prompts, responses, strict=True):
            wanted = Wanted(response[:length], top_k, vocabulary)
            futures.append(self._loop.submit(self._top_tokens(self.served_model, prompt[:start], wanted)))
        return futures

    async def _top_tokens(self, model: str, prompt: list[int], wanted: Wanted) -> TopTokens:
        """Return the (T, K) top tokens of a response."""
        response, top_k = wanted.response, wanted.top_k
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
            entries = [_pairs(entry) for entry in positions]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise RunError(f"{url} returned no log-probabilities of the prompt: is it a vLLM server?") from None
        entries = [wanted.without_padding(entry) for entry in entries]
        if mistake := wanted.mistake(entries):
            raise RunError(f"{url} returned {mistake}")
        tokens = [sorted(entry, reverse=True)[:top_k] for entry in entries]
        logprobs, ids = (torch.tensor([[pair[i] for pair in row] for row in tokens]) for i in range(2))
        return TopTokens.of(ids.long(), logprobs.float())


@dataclass(frozen=True)
class Wanted:
    """Requested log-probabilities.

    Args:
        response: T token ids.
        top_k: K, number of tokens of each distribution.
        vocabulary: number of tokens; None: unknown.
    """

    response: list[int]
    top_k: int
    vocabulary: int | None

    def without_padding(self, entry: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
        """Return the pairs of a position without those of padding tokens, of which the teacher may have more."""
        end = self.vocabulary
        return [pair for pair in entry if end is None or not end <= pair[1] < end + _MOST_PADDING]

    def mistake(self, entries: Sequence[Sequence[tuple[float, int]]]) -> str | None:
        """Describe the first mistake in a reply, with its value; None for a valid one.

        Args:
            entries: pairs of log-probability and token id, for each position.
        """
        if len(entries) != len(self.response):
            return f"log-probabilities of {len(entries)} tokens, where those of {len(self.response)} were requested"
        for position, (entry, token) in enumerate(zip(entries, self.response, strict=True)):
            if len(entry) < self.top_k:
                return (
                    f"{len(entry)} log-probabilities of a token, where {self.top_k} were requested: start it with "
                    f"--max-logprobs {self.top_k}"
                )
            if reason := self._mistake_at(entry, token):
                return f"{reason} (token {position} of a response of {len(self.response)})"
        return None

    def _mistake_at(self, entry: Sequence[tuple[float, int]], token: int) -> str | None:
        ids = [number for _, number in entry]
        if len(set(ids)) < len(ids):
            return f"token {next(number for number in ids if ids.count(number) > 1)} twice"
        wrong = [number for number in ids if number < 0 or (self.vocabulary is not None and number >= self.vocabulary)]
        if wrong:
            return f"token {wrong[0]}, which is not one of the {self.vocabulary or 'model'} tokens"
        if token not in ids:
            return f"the tokens {sorted(ids)[:5]} without the text's own token {token}: they are of another position"
        if bad := [value for value, _ in entry if not math.isfinite(value) or value > _ROUNDING]:
            return f"a log-probability of {bad[0]:g}, {_NO_LOGITS}"
        total = math.fsum(math.exp(value) for value, _ in entry)
        if total > 1 + _ROUNDING:
            return f"probabilities of {len(entry)} tokens whose sum is {total:.4g}, {_NO_LOGITS}"
        if self.vocabulary is not None and total < len(entry) / self.vocabulary / 2:  # these are the most likely ones
            return f"the {len(entry)} most likely tokens with a probability of {total:.2g}, {_NO_LOGITS}"
        return None


_NO_LOGITS = "which log-probabilities cannot have: start it without --logprobs-mode"


def _pairs(entry: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return (log-probability, token id) of a position."""
    return [(float(value["logprob"]), int(token)) for token, value in entry.items()]
