"""vLLM behind four methods, for the engine process and for use in process. Importing this module imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from lightning_rlhf.rollout.weight_sync import Slot


class VLLMCore:
    """One vLLM engine that is stepped by its owner.

    Args:
        arguments: for ``vllm.LLM``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        extension = "lightning_rlhf.rollout.vllm_extension.WeightReceiver"
        self._llm = LLM(**{"worker_extension_cls": extension, **arguments})
        self._engine = self._llm.llm_engine
        self._version, self._asleep = -1, False
        self._adapter: LoRARequest | None = None

    @property
    def cache_size(self) -> dict[str, int]:
        """Number of cache blocks, ``blocks``, and tokens in each, ``block_size``."""
        cache = self._engine.vllm_config.cache_config
        return {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache; :meth:`load` allocates it again."""
        if not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def load(self, weights: dict[str, Any], version: int) -> None:
        """Take new weights from shared memory and forget every cached prefix of the old ones.

        An engine that sleeps gets the memory of its weights back before they come, and that of its cache afterwards:
        loading needs temporary memory.

        Raises:
            RuntimeError: a cached prefix could not be dropped because requests are running.
        """
        if self._asleep:
            self._llm.wake_up(["weights"])
        self._llm.collective_rpc("receive_weights", kwargs=weights)
        if self._asleep:
            if not self._llm.wake_up(["kv_cache"]):
                raise RuntimeError("vLLM did not wake up: some of its memory is still freed")
            self._asleep = False
        self._adapter = None  # vLLM forgets it with the weights it was for
        self._forget_prefixes()
        self._version = version

    def swap(self, adapter: str, version: int) -> None:
        """Answer with a LoRA adapter from now on, and forget every cached prefix.

        Args:
            adapter: directory that peft could have written; it may be overwritten afterwards.
            version: of the policy.

        Raises:
            RuntimeError: vLLM did not take it, or a cached prefix could not be dropped because requests are running.
        """
        if not self._engine.add_lora(LoRARequest("policy", 1, adapter, load_inplace=True)):
            raise RuntimeError(f"vLLM did not take the adapter in {adapter}")
        self._adapter = LoRARequest("policy", 1, adapter)
        self._forget_prefixes()
        self._version = version

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache because requests are running; push weights between rollouts")

    def lost(self, weights: dict[str, Any]) -> str | None:
        """Take the same weights again and see whether all arrive.

        Returns:
            Name of the first parameter that does not arrive; None if all do, as far as can be seen.
        """
        arrived = self._llm.collective_rpc("trace_weights", kwargs=weights)
        slots = [Slot(**slot) for slot in weights["layout"]]
        # Engines that share the parameters take a part each, and copies of some.
        whole = [sum(ranks) >= slot.numel for slot, *ranks in zip(slots, *arrived, strict=True)]
        return next((slot.name for slot, complete in zip(slots, whole, strict=True) if not complete), None)

    def add(self, requests: list[dict[str, Any]]) -> None:
        """Queue all requests or, if one is refused, none.

        Args:
            requests: each with ``id``, ``prompt``, ``seed`` and the fields of ``sampling``.
        """
        for number, request in enumerate(requests):
            try:
                self._add(request)
            except Exception:
                self._engine.abort_request([queued["id"] for queued in requests[:number]])
                raise

    def _add(self, request: dict[str, Any]) -> None:
        sampling = SamplingParams(
            **request["sampling"],
            seed=request["seed"],
            logprobs=0,
            detokenize=False,
            ignore_eos=True,  # the end token of config.json ends a response only if it is among the stop tokens
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        self._engine.add_request(request["id"], prompt, sampling, lora_request=self._adapter)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._engine.has_unfinished_requests()

    def step(self) -> Iterator[dict[str, Any]]:
        """Advance all requests by a token; the finished ones."""
        for output in self._engine.step():
            if output.finished:
                sample = output.outputs[0]
                yield {
                    "id": output.request_id,
                    "token_ids": list(sample.token_ids),
                    "logprobs": [float(value) for value in sample.logprobs.logprobs],
                    "finish_reason": "length" if sample.finish_reason == "length" else "stop",
                    "policy_version": self._version,
                }
