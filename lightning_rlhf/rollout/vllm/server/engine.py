"""Rollout engine for a vLLM server that the user starts and all ranks share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.models.positions import rotary_length
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine
from lightning_rlhf.rollout.ranks import RankGroup, world_size
from lightning_rlhf.rollout.vllm.requests import as_requests, check_expansion, check_temperature
from lightning_rlhf.rollout.vllm.server.client import RejectedKey, VLLMServer
from lightning_rlhf.rollout.vllm.server.push import PUSHES, WeightPush
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, PublishedNames, check_receives, in_dtype
from lightning_rlhf.types import Completion, PromptImages, SamplingParams

_COMPARED_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
_CONNECTIONS = 256  # largest number of concurrent requests of one rank


class VLLMServerEngine(RolloutEngine):
    """Engine for a vLLM server that the user starts; docs/rollouts.md has the command.

    The first rank pushes the weights, every rank sends its own prompts. The server labels each token with the version
    of the weights that generated it; a label other than that of the last push raises an error.

    Args:
        url: address, for example ``http://127.0.0.1:8000``.
        key_variable: environment variable with the server's API key; required for a server on another machine.
        ranks: number of consecutive ranks that split the trained model and so have the same prompts.
        timeout: longest wait for the server to start, and for one response, in seconds.
    """

    def __init__(self, url: str, key_variable: str = "VLLM_API_KEY", ranks: int = 1, timeout: float = 1800.0) -> None:
        if ranks < 1:
            raise UsageError(f"ranks must be at least 1, got {ranks}")
        if not timeout > 0:
            raise UsageError(f"timeout must be positive, got {timeout}")
        VLLMServer(url, None, timeout)  # validates the url
        self._url = url
        self._key_variable = key_variable
        self._ranks = ranks
        self._timeout = timeout
        self._server: VLLMServer | None = None
        self._push: WeightPush[Any] | None = None  # of the first rank, once the server responds
        self._version = -1
        self._threads = DaemonThreads(_CONNECTIONS, "requests")  # a request that has no response yet ends with the run
        self._generating = set[Future[Completion]]()
        self._served_images = set[str]()  # SHA-256 of those that the server has received
        self._image_locks: dict[frozenset[str], Lock] = {}  # of those that are being sent

    @property
    def traits(self) -> EngineTraits:
        """See :attr:`RolloutEngine.traits`."""
        return EngineTraits(ranks=self._ranks, overlaps=True, reads_images=True)

    @property
    def source(self) -> str:
        """See :attr:`RolloutEngine.source`."""
        return f"; the server is {self._url}"

    def check(self, sampling: SamplingParams) -> None:
        """See :meth:`RolloutEngine.check`."""
        check_temperature(sampling)

    def start(self, setup: EngineSetup) -> None:
        """Connect the ranks; the server may start later. Called by all ranks of the run.

        Raises:
            ValueError: the server is on another machine, but no key is set.
        """
        key = os.environ.get(self._key_variable)
        server = VLLMServer(self._url, key, self._timeout)
        if not key and not server.is_local:
            raise UsageError(
                f"{self._url} is not on this machine, so it needs an API key: set it in {self._key_variable}"
            )
        check_receives(setup.model, setup.max_tokens)
        self._server = server
        self._served_images.clear()
        self._setup = setup
        self._published = PublishedNames(setup.model)
        self._all_ranks = RankGroup(world_size())
        self.group = RankGroup(self._ranks) if self._ranks > 1 else None
        # Distinguishes the labels of several runs that push to one server.
        self._run_id = self._all_ranks.run_on_first(lambda: secrets.token_hex(4))

    def wait(self) -> str:
        """Wait for the server and validate its settings.

        Raises:
            EngineDied: the server does not start in time.
            ValueError: the server's settings do not fit this run.
        """
        return self._all_ranks.run_on_first(self._inspect)

    def _inspect(self) -> str:
        server = self._connected_server
        server.wait_until_up()
        if not server.is_local:
            self._check_key_is_required(server)
        config = server.get("/server_info", config_format="json")["vllm_config"]
        backend = str((config.get("weight_transfer_config") or {}).get("backend"))
        if (remedy := next(self._remedies(config, backend), None)) is not None:
            raise UsageError(f"the vLLM server at {server.url} does not fit this run; start it with {remedy}")
        self._compare_models(config["model_config"]["model"])
        self._push = PUSHES[backend](server, has_images=self._setup.processor is not None)
        return f"vLLM {server.get('/version')['version']} at {server.url}"

    def _remedies(self, config: dict[str, Any], backend: str) -> Iterator[str]:
        """Yield the option that corrects each setting of the server that does not fit this run.

        Args:
            config: the server's settings.
            backend: its transport of weights.
        """
        server, model = self._connected_server, config["model_config"]
        dtype = self._setup.dtype
        needed_tokens, served_tokens = self._setup.max_tokens, model["max_model_len"]
        # Above this length, vLLM computes all texts with the Long-RoPE factors of long ones; None for other models.
        longrope_limit = rotary_length(
            AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False), "longrope"
        )
        if self._setup.processor is not None and model["skip_tokenizer_init"]:
            yield "--enable-scale-out, not --tokens-only: with it, the server reads no images"
        if backend not in PUSHES:
            yield f"--weight-transfer-config with the backend {' or '.join(PUSHES)}, not {backend}"
        if backend == SHARED_MEMORY and not server.is_local:
            yield f"--weight-transfer-config with the backend nccl, not {backend}: it is on another machine"
        if model["logprobs_mode"] != "processed_logprobs":
            yield "--logprobs-mode processed_logprobs"
        if model["dtype"] != f"torch.{dtype}":
            yield f"--dtype {dtype}, not {model['dtype']}"
        if served_tokens < needed_tokens:
            yield f"--max-model-len {needed_tokens}, not {served_tokens}"
        if longrope_limit is not None and served_tokens > longrope_limit:
            yield (
                f"--max-model-len {longrope_limit} or less, not {served_tokens}: above it, vLLM computes all texts "
                f"with the Long-RoPE factors of long ones"
            )
        if config["device_config"]["device"] == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]:
            yield "--no-enable-chunked-prefill: with it, seeded requests crash vLLM 0.32 on a CPU"

    def _check_key_is_required(self, server: VLLMServer) -> None:
        """Raise unless the server rejects a request for its weights without a key."""
        try:
            server.get("/weight_info", with_key=False)
        except RejectedKey:
            return
        raise UsageError(
            f"the vLLM server at {server.url} lets anyone change its weights; start it with "
            f"--middleware lightning_rlhf.rollout.vllm.server.plugin.GuardedRoutes"
        )

    def _compare_models(self, name: str) -> None:
        """Raise if the server's model has another architecture; skipped if its config is not on this machine."""
        ours = AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False).to_dict()
        try:
            theirs = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True).to_dict()
        except OSError:
            return  # a difference is detected later, by the first push or the check of log-probabilities
        for key in _COMPARED_KEYS:
            if ours.get(key) != theirs.get(key):
                raise UsageError(
                    f"the vLLM server at {self._url} serves another model, {name}: its {key} is {theirs.get(key)}, but "
                    f"the actor's is {ours.get(key)}; start it with the actor's model"
                )

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`; the first rank sends the parameters, all ranks exhaust them."""
        futures.wait(list(self._generating))
        self._all_ranks.gather(None)  # the first rank pushes only after all ranks have received their responses
        self._version = version

        def push(remaining: Iterable[tuple[str, Tensor]]) -> None:
            assert self._push is not None
            self._push(in_dtype(self._published(remaining), self._setup.dtype), self._label)

        self._all_ranks.run_on_first_with(parameters, push)

    @property
    def _label(self) -> str:
        return f"run {self._run_id}, version {self._version}"

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """See :meth:`RolloutEngine.request`; each request has a separate connection.

        A future raises :class:`EngineDied` also if the server generated with weights other than those of the last push.
        """
        return self._send(prompts, sampling, seeds, ())

    def request_with_images(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        images: Sequence[PromptImages],
    ) -> list[Future[Completion]]:
        """See :meth:`RolloutEngine.request_with_images`; images that the server has are not sent again."""
        return self._send(prompts, sampling, seeds, images)

    def _send(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        images: Sequence[PromptImages],
    ) -> list[Future[Completion]]:
        server = self._connected_server  # raises before start()
        requests = as_requests(prompts, sampling, seeds, images)
        of_requests = [of_prompt.images for of_prompt in images] or [()] * len(requests)
        sent = [
            self._threads.submit(self._generate, server, request, of_request)
            for request, of_request in zip(requests, of_requests, strict=True)
        ]
        self._generating.update(sent)
        for future in sent:
            future.add_done_callback(self._generating.discard)
        return sent

    def _generate(self, server: VLLMServer, request: dict[str, Any], images: Sequence[EncodedImage] = ()) -> Completion:
        """Send one request and wait for its completion."""
        fixed = {
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "ignore_eos": True,  # the tokens that end a response are in stop_token_ids
            "seed": request["seed"],
        }
        body = {"token_ids": request["prompt"], "sampling_params": {**request["sampling"], **fixed}}
        if images:
            response = self._with_images({**body, "token_ids": request["unexpanded"]}, server, images)
            check_expansion(request["prompt"], response["prompt_token_ids"], len(images))
        else:
            response = server.post("/inference/v1/generate", body)
        return self._completion(response["choices"][0], response.get("prompt_logprobs") or [])

    def _with_images(self, body: dict[str, Any], server: VLLMServer, images: Sequence[EncodedImage]) -> Any:
        """Send one request with images by their SHA-256; a request of one token has sent their files before."""

        def post(with_files: bool, **sampling: Any) -> Any:
            parts = [
                {"type": "image_url", "url": image.data_url() if with_files else None, "uuid": image.sha256}
                for image in images
            ]
            fields = {"sampling_params": {**body["sampling_params"], **sampling}}
            sent = {**body, **fields, "content_parts": parts, "return_token_ids": True}
            return server.post("/inference/v1/generate", sent)

        names = frozenset(image.sha256 for image in images)
        with self._image_locks.setdefault(names, Lock()):  # the other responses to the prompt wait
            if not names <= self._served_images:
                post(with_files=True, max_tokens=1, prompt_logprobs=None)
                self._served_images |= names
        self._image_locks.pop(names, None)
        try:
            return post(with_files=False)
        except EngineDied:
            raise
        except RunError:  # the server keeps some images only
            return post(with_files=True)

    def _completion(self, choice: dict[str, Any], prompt_logprobs: list[dict[str, Any] | None]) -> Completion:
        """Return a completion from the server's response.

        Args:
            choice: the response.
            prompt_logprobs: log-probs of the prompt's tokens, if ``echo`` requested them: for each token a mapping
                from its id as text to its log-prob, None for the first one.
        """
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if not versions:
            raise EngineDied(f"the vLLM server at {self._url} returned no version of the weights with a response")
        if versions != {self._label}:
            raise EngineDied(
                f"the vLLM server at {self._url} generated with the weights {sorted(versions)}, not with those of "
                f"{self._label!r}: it was restarted, or another run pushed weights"
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineDied(f"the vLLM server at {self._url} aborted a response ({choice['finish_reason']})")
        # (token id, fields with its log-prob): those of a requested prompt without its first token, then sampled ones.
        echoed = [item for position in prompt_logprobs for item in (position or {}).items()]
        sampled = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
        tokens = [*echoed, *sampled]
        logprobs = [float(fields["logprob"]) for _, fields in tokens]
        token_ids = [int(token) for token, _ in tokens]
        return Completion(token_ids, logprobs, choice["finish_reason"], self._version)

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`; every rank exhausts the parameters."""

        def compare(remaining: Iterable[tuple[str, Tensor]]) -> str | None:
            assert self._push is not None
            return self._push.first_difference(in_dtype(self._published(remaining), self._setup.dtype))

        return self._all_ranks.run_on_first_with(parameters, compare)

    def close(self) -> None:
        """Close the connection; the server keeps running."""
        if self._push is not None:
            self._push.close()
        self._threads.close()
        self._server = None
        self._push = None

    @property
    def _connected_server(self) -> VLLMServer:
        if self._server is None:
            raise RunError("the engine is not running: call start() first")
        return self._server
