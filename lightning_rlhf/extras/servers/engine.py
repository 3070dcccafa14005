"""Rollout engine for vLLM servers that the user starts and all ranks share."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import AutoConfig
from typing_extensions import override

from lightning_rlhf.calls.threads import DaemonThreads
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import EngineDied, RunError, UsageError
from lightning_rlhf.extras.servers.client import HOW_TO_START, RejectedKey, VLLMServer
from lightning_rlhf.extras.servers.push import TRANSPORTS, WeightPush
from lightning_rlhf.extras.servers.servers import Addresses, Limits, Member, Servers, label_of
from lightning_rlhf.models.positions import rotary_length
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine
from lightning_rlhf.rollout.ranks import RankGroup, world_size
from lightning_rlhf.rollout.vllm.requests import (
    as_requests,
    check_expansion,
    check_temperature,
    check_tokens,
    vocabulary_of,
)
from lightning_rlhf.rollout.vllm.sync import SHARED_MEMORY, PublishedNames, check_receives, in_dtype
from lightning_rlhf.types import Completion, SamplingParams, TokenPrompt

log = logging.getLogger(__name__)
_COMPARED_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
_CONNECTIONS = 256  # largest number of concurrent requests of one rank
_HEARTBEAT_SECONDS = 60
_GRACE_SECONDS = 60.0  # wait for a server that does not respond, if weights are not kept
_HEALTH_SECONDS = 5.0  # longest wait for one server while another may respond
_ROUTE = "/inference/v1/generate"
_PROOF_TOKENS = 32
_PROOF_BOUNDS = {"float32": 1e-2, "bfloat16": 1.0}  # largest differences of log-probs between servers, nats


class VLLMServerEngine(RolloutEngine):
    """Generates on one or more vLLM servers that you start with the command in docs/rollouts.md.

    The first rank pushes the weights to all servers with vLLM's weight-transfer API. Running requests end, the weights
    are replaced, and the prefix cache is emptied. Every rank distributes its own prompts between the servers. A server
    labels each token with the version of the weights that generated it.

    If a server dies, hangs or holds other weights, it is left out until it works again and holds the weights of the
    last push. Its requests are generated again from their seeds. If a request fails on a server that works otherwise,
    as on a bad network, it is sent three times. On a CPU the results are the same bits as without the failure. If no
    server is left, the run waits up to ``timeout``.

    With NCCL the trainer keeps no copy of the weights. So a server that was restarted waits for the next push, and a
    run without servers ends after a minute. If a server dies in the middle of a push, the trainer's GPU may hang until
    you end the run. We know this from reading the code, and have not run it on a GPU.

    Servers on the trainer's machine load a push at the same time. With NCCL they load in turn. A push needs room for
    the largest parameter (three times under ``rlhf_fsdp``) and a constant, which is at most 256 MiB with NCCL. After
    it, all servers score the same 32 tokens, and the run ends if they differ.

    Requests go to the server with the fewest unfinished ones. Up to a difference of eight, the responses to one prompt
    and the turns of one conversation go to the server with the longest beginning of their text in its cache.

    Args:
        urls: address, for example ``http://127.0.0.1:8000``, several addresses, or the path of a file ``*.txt`` with
            one in each line. Environment variables in the path are replaced. The file is read again before each push,
            so you can add and remove servers. A new server gets requests once it holds the weights. A removed one gets
            no more.
        key_variable: environment variable with the servers' API key. Required for a server on another machine.
        ranks: consecutive ranks that split the trained model and so share their prompts.
        timeout: longest wait for a server to start, for one to be used again, and for one response, in seconds.
        silent_seconds: longest time in which a server may not respond although it works, in seconds.
        max_restarts: most failures of a server within an hour after which it is used again.
    """

    serves_several_ranks = True

    def __init__(
        self,
        urls: str | list[str],
        key_variable: str = "VLLM_API_KEY",
        ranks: int = 1,
        timeout: float = 1800.0,
        silent_seconds: float = 900.0,
        max_restarts: int = 3,
    ) -> None:
        check_range("ranks", ranks, "at least 1")
        for name, seconds in (("timeout", timeout), ("silent_seconds", silent_seconds)):
            if not seconds > 0:
                raise UsageError(f"{name} must be positive, got {seconds}")
        check_range("max_restarts", max_restarts, "at least 0")
        self._addresses = Addresses(urls)
        self._key_variable = key_variable
        self._ranks = ranks
        self._timeout = timeout
        self._silent_seconds = silent_seconds
        self._max_restarts = max_restarts
        self._servers: Servers | None = None
        self._push: WeightPush | None = None  # of the first rank, once a server responds
        self._push_lock = Lock()  # of the pushed weights and their label
        self._backend: str | None = None  # of the servers' weight transfer
        self._proof: list[float] | None = None  # log-probs of a text with the weights of the last push
        self._version = -1
        self._threads = DaemonThreads(_CONNECTIONS, "requests")  # a request that has no response yet ends with the run
        self._generating = set[Future[Completion]]()

    @property
    @override
    def traits(self) -> EngineTraits:
        return EngineTraits(ranks=self._ranks, push_ranks=world_size(), overlaps=True, reads_images=True, restarts=True)

    @property
    @override
    def source(self) -> str:
        return f"; the vLLM servers are {self._addresses}"

    @property
    def restarted(self) -> int:
        """Number of times that this rank left out a server."""
        return 0 if self._servers is None else self._servers.left_out

    @override
    def check(self, sampling: SamplingParams) -> None:
        check_temperature(sampling)

    def start(self, setup: EngineSetup) -> None:
        """Connect the ranks; the servers may start later. Called by all ranks of the run.

        Raises:
            ValueError: a server is on another machine but no key is set, or the run is on several machines and an
                address is that of each machine itself.
        """
        check_receives(setup.model, setup.max_tokens)
        self._setup = setup
        self._published = PublishedNames(setup.model)
        self._vocabulary = vocabulary_of(setup.model)
        self._all_ranks = RankGroup(world_size())
        self.group = RankGroup(self._ranks) if self._ranks > 1 else None
        hosts = self._all_ranks.gather(socket.gethostname())
        self._hosts = self._all_ranks.run_on_first(lambda: sorted(set(hosts)))
        prepare = self._prepare if self._all_ranks.is_first else None
        limits = Limits(self._timeout, self._silent_seconds, self._max_restarts)
        self._servers = Servers(self._addresses, self._client, prepare, limits)
        # Distinguishes the labels of several runs that push to one server.
        self._run_id = self._all_ranks.run_on_first(lambda: secrets.token_hex(4))

    def _client(self, url: str) -> VLLMServer:
        key = os.environ.get(self._key_variable)
        server = VLLMServer(url, key, self._timeout)
        if server.is_local and len(self._hosts) > 1:
            raise UsageError(
                f"{url} is another server on each of the machines of this run ({', '.join(self._hosts)}): use an "
                f"address that all of them reach, with an API key in {self._key_variable}"
            )
        if not key and not server.is_local:
            raise UsageError(f"{url} is not on this machine, so it needs an API key: set it in {self._key_variable}")
        return server

    def wait(self) -> str:
        """Wait for a server, and validate the settings of all that respond; others may start later.

        Raises:
            EngineDied: no server starts in time.
            ValueError: the settings of a server do not fit this run.
        """
        description, urls = self._all_ranks.run_on_first(self._wait_for_servers)
        if not self._all_ranks.run_on_first(self._keeps_weights):
            # A server that was restarted gets no weights before the next push, for which the run would wait.
            self._running.longest_wait = min(self._timeout, _GRACE_SECONDS)
        for member in self._running.members:
            if member.server.url in urls:
                self._running.use(member)
        return description

    def _keeps_weights(self) -> bool:
        assert self._push is not None
        return self._push.transport.keeps_weights

    def _wait_for_servers(self) -> tuple[str, list[str]]:
        """Wait for a server; return a description of those that respond, and their addresses."""
        began = last_logged = time.monotonic()
        while True:
            self._running.refresh()
            members, cause = self._running.members, EngineDied(f"no server has an address yet: {self._addresses}")
            descriptions: dict[str, str] = {}
            for member in members:
                try:
                    member.server.get("/health", seconds=_HEALTH_SECONDS)
                    descriptions[member.server.url] = self._inspect(member.server)
                except EngineDied as error:
                    cause = error
            if descriptions:
                missing = f" ({len(descriptions)} of {len(members)} servers)" if len(members) > 1 else ""
                return f"{', '.join(descriptions.values())}{missing}", list(descriptions)
            now = time.monotonic()
            if now - began > self._timeout:
                raise EngineDied(f"{cause}; {HOW_TO_START}")
            if now - last_logged > _HEARTBEAT_SECONDS:
                last_logged = now
                log.info("Waiting for a vLLM server for %.0f s: %s.", now - began, cause)
            time.sleep(min(1.0, self._timeout))

    def _inspect(self, server: VLLMServer) -> str:
        """Validate the settings of a server; return its description.

        Raises:
            EngineDied: its description of itself cannot be read.
            ValueError: the settings do not fit this run.
        """
        if not server.is_local:
            self._check_key_is_required(server)
        version, info = server.get("/version"), server.get("/server_info", config_format="json")
        try:
            description = f"vLLM {version['version']} at {server.url}"
            config = info["vllm_config"]
            backend = str((config.get("weight_transfer_config") or {}).get("backend"))
            model, remedy = config["model_config"]["model"], next(self._remedies(server, config, backend), None)
        except (AttributeError, KeyError, TypeError) as error:
            raise EngineDied(
                f"the vLLM server at {server.url} sent an invalid response at /version or /server_info "
                f"({type(error).__name__}: {error})"
            ) from error
        if remedy is not None:
            raise UsageError(f"the vLLM server at {server.url} does not fit this run; start it with {remedy}")
        self._compare_models(server, model)
        self._compare_heads(server, config["model_config"])
        if self._push is None:
            self._backend = backend
            self._push = WeightPush(TRANSPORTS[backend](), has_images=self._setup.processor is not None)
        return description

    def _remedies(self, server: VLLMServer, config: dict[str, Any], backend: str) -> Iterator[str]:
        """Yield the option that corrects each setting of a server that does not fit this run.

        Args:
            config: its settings.
            backend: its transport of weights.
        """
        model = config["model_config"]
        dtype = self._setup.dtype
        needed_tokens, served_tokens = self._setup.max_tokens, model["max_model_len"]
        # Above this length, vLLM computes all texts with the Long-RoPE factors of long ones; None for other models.
        longrope_limit = rotary_length(
            AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False), "longrope"
        )
        if self._setup.processor is not None and model["skip_tokenizer_init"]:
            yield "--enable-scale-out, not --tokens-only: with it, the server reads no images"
        if backend not in TRANSPORTS:
            yield f"--weight-transfer-config with the backend {' or '.join(TRANSPORTS)}, not {backend}"
        elif self._backend not in (None, backend):
            yield f"--weight-transfer-config with the backend {self._backend} of the other servers, not {backend}"
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
            f"--middleware lightning_rlhf.extras.servers.plugin.GuardedRoutes"
        )

    def _compare_models(self, server: VLLMServer, name: str) -> None:
        """Raise if a server's model has another architecture; skipped if its config is not on this machine."""
        ours = AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False).to_dict()
        try:
            theirs = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True).to_dict()
        except OSError:
            return  # a difference is detected later, by the first push or the check of log-probabilities
        for key in _COMPARED_KEYS:
            if ours.get(key) != theirs.get(key):
                raise UsageError(
                    f"the vLLM server at {server.url} serves another model, {name}: its {key} is {theirs.get(key)}, "
                    f"but the actor's is {ours.get(key)}; start it with the actor's model"
                )

    def _compare_heads(self, server: VLLMServer, model: dict[str, Any]) -> None:
        """Warn if a server in bfloat16 rounds its logits, and the actor does not, or the reverse.

        Args:
            model: settings of its model.
        """
        ours = getattr(AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False), "head_dtype", "model")
        overrides = model.get("hf_overrides") or {}
        theirs = overrides.get("head_dtype", "model") if isinstance(overrides, dict) else ours
        if self._setup.dtype != "float32" and theirs != ours:
            log.warning(
                "The head of the vLLM server at %s has logits of another dtype (%s) than the actor's (%s), so that "
                "their log-probabilities differ more than they need to: start it with --hf-overrides "
                "'{\"head_dtype\": \"%s\"}', or set float32_logits of the actor",
                server.url, theirs, ours, ours,
            )  # fmt: skip

    @override
    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The first rank sends the parameters, all ranks exhaust them.

        Raises:
            EngineDied: no server can be used.
            RuntimeError: two servers compute different log-probs with these weights.
        """
        futures.wait(list(self._generating))
        self._all_ranks.gather(None)  # the first rank pushes only after all ranks have received their responses
        servers = self._running
        left = servers.refresh()
        if not self._all_ranks.is_first:
            self._version = version
            servers.start_push(self._label)
        failed = self._all_ranks.run_on_first_with(parameters, partial(self._push_to_all, version=version, left=left))
        for member in servers.members:
            if (message := failed.get(member.server.url)) is not None:
                servers.leave_out(member, member.uses, EngineDied(message))
        servers.end_push()
        self._all_ranks.run_on_first(servers.wait_for_one)

    def _push_to_all(
        self, parameters: Iterable[tuple[str, Tensor]], version: int, left: Sequence[Member]
    ) -> dict[str, str]:
        """Push weights to all servers that respond; return the errors of those that fail, by their addresses.

        Args:
            parameters: argument of :meth:`update_weights`.
            version: version of the policy.
            left: servers that have left the run.
        """
        assert self._push is not None
        servers = self._running
        for member in servers.members:
            if not member.is_used:
                member.server.abort()  # a push of older weights, which has the lock
        with self._push_lock:
            self._version = version  # with the lock, because the label belongs to the weights that are kept
            servers.start_push(self._label)
            for member in (*left, *servers.members):
                if not member.is_used:
                    self._push.disconnect(member.server)  # it may have been restarted
            members = {member.server: member for member in servers.members if self._can_be_pushed_to(member)}
            pushed = in_dtype(self._published(parameters), self._setup.dtype)
            with ExitStack() as limits:
                for server in members:  # there are no requests of this run now
                    limits.enter_context(server.limited_to(self._silent_seconds))
                errors = self._push(list(members), pushed, self._label)
            self._proof = None
            for server, member in members.items():
                try:
                    if server not in errors:
                        self._prove(server)
                        servers.use(member)
                except EngineDied as error:
                    errors[server] = error
        if errors and len(errors) == len(members) and not self._push.transport.keeps_weights:
            raise next(iter(errors.values()))
        return {server.url: str(error) for server, error in errors.items()}

    def _can_be_pushed_to(self, member: Member) -> bool:
        """Return whether a server responds, and its settings fit this run."""
        if member.is_used or member.given_up or not member.is_up:
            return member.is_used
        try:
            self._inspect(member.server)
        except (RunError, UsageError) as error:
            log.warning("The vLLM server at %s gets no weights: %s", member.server.url, error)
            return False
        return True

    def _prepare(self, member: Member) -> None:
        """Use a server that works again; one without the weights of the last push gets them first, if they are kept."""
        with self._push_lock:
            if self._push is None or member.is_used or member.has_left:
                return  # the run has ended, or a push has just given it the weights
            if self._running.has_weights(member):
                self._push.resume(member.server)  # which may have failed after the push
                self._running.use(member)
            elif self._push.transport.keeps_weights:  # else it gets those of the next push
                self._inspect(member.server)
                self._push.repeat(member.server, self._label)
                self._prove(member.server)
                self._running.use(member)

    def _prove(self, server: VLLMServer) -> None:
        """Compare the log-probs of a short text with those of the other servers with the same weights.

        The check of a run compares log-probs of responses with the actor's, but these may all be of one server.

        Raises:
            RuntimeError: they differ, so the server has damaged the weights.
        """
        length = min(_PROOF_TOKENS, self._setup.max_tokens - 1)
        if len(self._running.members) == 1 or length < 2:
            return
        text = [3 + token % max(self._vocabulary - 3, 1) for token in range(length)]
        sampling = SamplingParams(1, echo=True)
        (request,) = as_requests([TokenPrompt(text)], [sampling], [0])
        logprobs = self._post(server, request).logprobs[: len(text) - 1]
        self._proof = self._proof or logprobs
        gap = max(abs(ours - theirs) for ours, theirs in zip(logprobs, self._proof, strict=True))
        if not gap <= _PROOF_BOUNDS[self._setup.dtype]:
            raise RunError(
                f"the vLLM server at {server.url} has the same weights as the others, but its log-probabilities of the "
                f"same text differ by {gap:.3g} nats (allowed: {_PROOF_BOUNDS[self._setup.dtype]:g}): it has damaged "
                f"them, or has other settings"
            )

    @property
    def _label(self) -> str:
        return label_of(self._run_id, self._version)

    @override
    def request(
        self, prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        """Each request has a separate connection.

        A future raises :class:`EngineDied` also if the server generated with weights other than those of the last push.
        Images that the server has are not sent again.
        """
        servers = self._running  # raises before start()
        sent = [
            self._threads.submit(self._generate, servers, request, prompt.encoded_images)
            for request, prompt in zip(as_requests(prompts, sampling, seeds), prompts, strict=True)
        ]
        self._generating.update(sent)
        for future in sent:
            future.add_done_callback(self._generating.discard)
        return sent

    def _generate(self, servers: Servers, request: dict[str, Any], images: Sequence[EncodedImage] = ()) -> Completion:
        """Send one request to a server, and wait for its completion."""

        def send(member: Member) -> Completion:
            return self._post(member.server, request) if not images else self._post_with_images(member, request, images)

        return servers.call(request["prompt"], send)

    def _post(self, server: VLLMServer, request: dict[str, Any]) -> Completion:
        """Send one request without images."""
        response = server.post(_ROUTE, {"token_ids": request["prompt"], "sampling_params": _sampling(request)})
        return self._completion(server, response, request)

    def _post_with_images(self, member: Member, request: dict[str, Any], images: Sequence[EncodedImage]) -> Completion:
        """Send one request with images by their SHA-256; a request of one token has sent their files before."""

        def post(with_files: bool, **sampling: Any) -> Any:
            parts = [
                {"type": "image_url", "url": image.data_url() if with_files else None, "uuid": image.sha256}
                for image in images
            ]
            body = {"token_ids": request["unexpanded"], "sampling_params": {**_sampling(request), **sampling}}
            return member.server.post(_ROUTE, {**body, "content_parts": parts, "return_token_ids": True})

        names = frozenset(image.sha256 for image in images)
        with member.image_locks.setdefault(names, Lock()):  # the other responses to the prompt wait
            if not names <= member.images:
                post(with_files=True, max_tokens=1, prompt_logprobs=None)
                member.images |= names
        member.image_locks.pop(names, None)
        try:
            response = post(with_files=False)
        except EngineDied:
            raise
        except RunError:  # the server keeps some images only
            response = post(with_files=True)
        completion = self._completion(member.server, response, request)
        check_expansion(request["prompt"], response["prompt_token_ids"], len(images))
        return completion

    def _completion(self, server: VLLMServer, response: Any, request: dict[str, Any]) -> Completion:
        """Return the completion in a server's response.

        Raises:
            EngineDied: the response is invalid, or is from other weights than those of the last push.
        """
        try:
            (choice,) = response["choices"]
            versions = {span["version"] for span in choice["weight_versions"] or []}
            reason = choice["finish_reason"]
            # Log-probs of the prompt, if ``echo`` requested them: for each token a mapping from its id as text to the
            # fields of its log-prob, None for the first one.
            of_prompt = response.get("prompt_logprobs") or []
            echoed = [item for position in of_prompt for item in (position or {}).items()]
            sampled = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
            tokens = [(int(token), float(fields["logprob"])) for token, fields in (*echoed, *sampled)]
            check_tokens([token for token, _ in tokens], request, self._vocabulary)
        except (AttributeError, KeyError, TypeError, ValueError, RunError) as error:
            raise EngineDied(
                f"the vLLM server at {server.url} sent an invalid response ({type(error).__name__}: {error})"
            ) from error
        if versions != {self._label}:
            raise EngineDied(
                f"the vLLM server at {server.url} generated with the weights {sorted(versions)}, not with those of "
                f"{self._label!r}: it was restarted, or another run pushed weights"
            )
        if reason not in ("stop", "length"):
            raise EngineDied(f"the vLLM server at {server.url} aborted a response ({reason})")
        return Completion([token for token, _ in tokens], [logprob for _, logprob in tokens], reason, self._version)

    @override
    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Every rank exhausts the parameters."""

        def compare(remaining: Iterable[tuple[str, Tensor]]) -> str | None:
            assert self._push is not None
            return self._push.transport.first_difference(in_dtype(self._published(remaining), self._setup.dtype))

        return self._all_ranks.run_on_first_with(parameters, compare)

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        if self._servers is not None:
            self._servers.close()
        if self._push is not None:
            with self._push_lock:
                self._push.close()
        self._threads.close()
        self._servers = None
        self._push = None
        self._backend = None

    @property
    def _running(self) -> Servers:
        if self._servers is None:
            raise RunError("the engine is not running: call start() first")
        return self._servers


def _sampling(request: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request, as the server expects them."""
    fixed = {
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        "ignore_eos": True,  # the tokens that end a response are in stop_token_ids
        "seed": request["seed"],
    }
    return {**request["sampling"], **fixed}
