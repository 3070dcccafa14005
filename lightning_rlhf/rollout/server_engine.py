"""One vLLM server, started by hand, that serves all ranks."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from lightning_rlhf.rollout.engine import EngineDied, EngineSetup, Finished, RolloutEngine
from lightning_rlhf.rollout.published_names import PublishedNames
from lightning_rlhf.rollout.ranks import RankGroup, generate_together, world_size
from lightning_rlhf.rollout.server_client import VLLMServer
from lightning_rlhf.rollout.vllm_requests import as_requests, check_temperature
from lightning_rlhf.rollout.weight_push import PUSHES, WeightPush
from lightning_rlhf.rollout.weight_sync import SHARED_MEMORY, in_dtype
from lightning_rlhf.types import Completion, SamplingParams

_SHAPES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip


class VLLMServerEngine(RolloutEngine):
    """A vLLM server that the user started; docs/rollouts.md has the command.

    The first rank pushes the weights, every rank sends its own prompts. The server labels each token with the weights
    it is from, and an answer from any but the last push is refused.

    Args:
        url: for example ``http://127.0.0.1:8000``.
        key_variable: environment variable with the server's API key; one on another machine must ask for a key.
        ranks: consecutive ranks that hold the same prompts, because they split the trained model between them.
        patience: longest wait for the server to come up, and for one answer, in seconds.
    """

    def __init__(self, url: str, key_variable: str = "VLLM_API_KEY", ranks: int = 1, patience: float = 1800.0) -> None:
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if not patience > 0:
            raise ValueError(f"patience must be positive, got {patience}")
        VLLMServer(url, None, patience)  # looks at the url
        self._url, self._key_variable, self._ranks, self._patience = url, key_variable, ranks, patience
        self._server: VLLMServer | None = None
        self._push: WeightPush | None = None
        self._version = -1

    @property
    def ranks(self) -> int:
        """See :meth:`RolloutEngine.ranks`."""
        return self._ranks

    def check(self, sampling: SamplingParams) -> None:
        """See :meth:`RolloutEngine.check`."""
        check_temperature(sampling)

    def start(self, setup: EngineSetup) -> None:
        """Join with the other ranks; the server may come up later. All ranks of the run.

        Raises:
            ValueError: the server is on another machine and there is no key.
        """
        key = os.environ.get(self._key_variable)
        server = VLLMServer(self._url, key, self._patience)
        if not key and not server.is_local:
            raise ValueError(
                f"{self._url} is not on this machine, so it must ask for a key: put it into {self._key_variable}"
            )
        self._server, self._setup, self._published = server, setup, PublishedNames(setup.model)
        self._all, self._sharing = RankGroup(world_size()), RankGroup(self._ranks)
        # Two runs that push to one server notice each other.
        self._run = self._all.first_does(lambda: secrets.token_hex(4))

    def wait(self) -> str:
        """Wait for the server and see whether it fits.

        Raises:
            EngineDied: it does not come up.
            ValueError: it was started otherwise than this run needs it.
        """
        return self._all.first_does(self._inspect)

    def _inspect(self) -> str:
        server = self._running
        server.wait_until_up()
        if not server.is_local:
            self._see_that_it_is_guarded(server)
        config = server.get("/server_info", config_format="json")["vllm_config"]
        backend = str((config.get("weight_transfer_config") or {}).get("backend"))
        for wrong, told in (
            (backend not in PUSHES, f"--weight-transfer-config with the backend {' or '.join(PUSHES)}, not {backend}"),
            (backend == SHARED_MEMORY and not server.is_local, "the backend nccl, because it is on another machine"),
            *self._unfit(config),
        ):
            if wrong:
                raise ValueError(f"the vLLM server at {server.url} does not fit this run; start it with {told}")
        self._compare_models(config["model_config"]["model"])
        self._push = PUSHES[backend](server)
        return f"vLLM {server.get('/version')['version']} at {server.url}"

    def _unfit(self, config: dict[str, Any]) -> list[tuple[bool, str]]:
        model, dtype, longest = config["model_config"], self._setup.dtype, self._setup.max_tokens
        chunked = config["device_config"]["device"] == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]
        return [
            (model["logprobs_mode"] != "processed_logprobs", "--logprobs-mode processed_logprobs"),
            (model["dtype"] != f"torch.{dtype}", f"--dtype {dtype}, not {model['dtype']}"),
            (model["max_model_len"] < longest, f"--max-model-len {longest}, not {model['max_model_len']}"),
            (chunked, "--no-enable-chunked-prefill: on a CPU, seeds kill vLLM 0.32 without it"),
        ]

    def _see_that_it_is_guarded(self, server: VLLMServer) -> None:
        try:
            server.get("/weight_info", keyless=True)
        except ValueError:
            return
        raise ValueError(
            f"the vLLM server at {server.url} lets anyone change its weights; start it with "
            f"--middleware lightning_rlhf.rollout.vllm_transfer.GuardedRoutes"
        )

    def _compare_models(self, name: str) -> None:
        """Refuse another architecture, where its config is to be had on this machine."""
        ours = AutoConfig.from_pretrained(self._setup.model, trust_remote_code=False).to_dict()
        try:
            theirs = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True).to_dict()
        except OSError:
            return  # then the first push, and the loop's comparison of log-probabilities, tell
        for key in _SHAPES:
            if ours.get(key) != theirs.get(key):
                raise ValueError(
                    f"the vLLM server at {self._url} serves another model, {name}: its {key} is {theirs.get(key)}, "
                    f"the actor's {ours.get(key)}"
                )

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`RolloutEngine.update_weights`; every rank exhausts the parameters, the first one sends them."""
        self._all.gather(None)  # a rank that still waits for answers would get some of them from the new weights
        parameters, self._version = iter(parameters), version

        def push() -> None:
            assert self._push is not None
            try:
                self._push(in_dtype(self._published(parameters), self._setup.dtype), self._label)
            finally:
                deque(parameters, maxlen=0)

        if not self._all.is_first:
            deque(parameters, maxlen=0)
        self._all.first_does(push)

    @property
    def _label(self) -> str:
        return f"run {self._run}, version {self._version}"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> list[Completion]:
        """See :meth:`RolloutEngine.generate`.

        Raises:
            EngineDied: the server is gone, or answered from other weights than the last ones pushed.
        """
        return generate_together(self._sharing, self._ask, prompts, sampling, seeds, finished)

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        finished: Finished | None,
    ) -> list[Completion]:
        fixed = {"logprobs": 0, "detokenize": False, "ignore_eos": True}
        bodies = [
            {
                "token_ids": request["prompt"],
                "sampling_params": {**request["sampling"], **fixed, "seed": request["seed"]},
            }
            for request in as_requests(prompts, sampling, seeds)
        ]
        done = dict[int, Completion]()
        for number, answer in self._running.post_all("/inference/v1/generate", bodies):
            done[number] = self._completion(answer["choices"][0])
            if finished is not None:
                finished(number, done[number])
        return [done[number] for number in range(len(bodies))]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        weights = {span["version"] for span in choice["weight_versions"] or []}
        if weights != {self._label}:
            raise EngineDied(
                f"the vLLM server at {self._url} answered from the weights {sorted(weights)}, not from those of "
                f"{self._label!r}: it was restarted, or somebody else pushed weights"
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineDied(f"the vLLM server at {self._url} gave up a response ({choice['finish_reason']})")
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        return Completion(choice["token_ids"], logprobs, choice["finish_reason"], self._version)

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """See :meth:`RolloutEngine.first_difference`; every rank exhausts the parameters."""
        parameters = iter(parameters)

        def compare() -> str | None:
            assert self._push is not None
            try:
                return self._push.first_difference(in_dtype(self._published(parameters), self._setup.dtype))
            finally:
                deque(parameters, maxlen=0)

        if not self._all.is_first:
            deque(parameters, maxlen=0)
        return self._all.first_does(compare)

    def close(self) -> None:
        """Let go of the server, which lives on."""
        if self._push is not None:
            self._push.close()
        self._server = self._push = None

    @property
    def _running(self) -> VLLMServer:
        if self._server is None:
            raise RuntimeError("the engine is not running: call start() first")
        return self._server
