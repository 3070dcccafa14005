"""Wrapper of ``vllm.LLM`` with the methods of rollouts. Importing this module imports vLLM."""

from __future__ import annotations

import gc
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.rollout.vllm.requests import check_expansion
from lightning_rlhf.rollout.vllm.sync import DIRECTORY_VERSION, Slot

_DECODED = 64  # images that are kept decoded
_MASKS = "return_sampling_mask"  # argument with which vLLM returns the tokens that limits left to sample from


class VLLMCore:
    """One vLLM engine, advanced by explicit calls of :meth:`step`.

    Args:
        arguments: arguments of ``vllm.LLM``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        arguments = {"worker_extension_cls": "lightning_rlhf.rollout.vllm.receiver.WeightReceiver", **arguments}
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:  # vLLM's program for CPUs returns none, and neither do some kinds of models
            if "sampling distribution replay" not in str(error):
                raise
            self._llm = LLM(**{**arguments, _MASKS: False})
        self._engine = self._llm.llm_engine
        self._asleep = False
        self._adapter: LoRARequest | None = None
        self._images: dict[str, EncodedImage] = {}
        self._unlimited = set[str]()  # requests that get no masks
        self._decoded = lru_cache(maxsize=_DECODED)(lambda sha256: self._images[sha256].open())
        self._begin_version(DIRECTORY_VERSION)
        # vLLM freezes what it has when its core is made, but not what follows, which each full collection would read.
        gc.freeze()

    @property
    def facts(self) -> dict[str, Any]:
        """Number of cache blocks, tokens in each, and which of its programs vLLM chose for this machine and model."""
        config = self._engine.vllm_config
        return {
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "scheduling": "asynchronous" if config.scheduler_config.async_scheduling else "synchronous",
        }

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache; :meth:`load` allocates it again."""
        if not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def load(self, weights: dict[str, Any], version: int) -> None:
        """Load new weights from shared memory; running requests continue with them.

        For a sleeping engine, memory for weights is allocated before they are loaded, and memory for the cache after
        that, because loading needs temporary memory.

        Args:
            weights: message of :class:`~lightning_rlhf.rollout.vllm.sync.WeightSender`.
            version: version of the policy.

        Raises:
            RuntimeError: vLLM did not wake up, or did not reset its prefix cache.
        """
        if self._asleep:
            self._llm.wake_up(["weights"])
        self._llm.collective_rpc("receive_weights", kwargs=weights)
        self._finish_load(version)

    def open_buffers(self, buffers: list[dict[str, Any]]) -> None:
        """Map the trainer's buffers, one on each GPU of this engine.

        Args:
            buffers: messages of :func:`~lightning_rlhf.extras.gpu_buffer.transfer.exported`.

        Raises:
            RuntimeError: they are on other GPUs, or cannot be mapped.
        """
        faults = self._llm.collective_rpc("open_buffers", kwargs={"messages": buffers})
        if fault := next(filter(None, faults), None):
            raise RunError(fault)

    def load_part(self, layout: list[dict[str, Any]], is_first: bool) -> None:
        """Load the parameters that are in the buffer; no request may run until :meth:`finish_parts`.

        Args:
            layout: fields of their :class:`~lightning_rlhf.rollout.vllm.sync.Slot`.
            is_first: whether they are the first ones of a push.
        """
        if is_first and self._asleep:
            self._llm.wake_up(["weights"])
        self._llm.collective_rpc("load_part", kwargs={"layout": layout, "is_first": is_first})

    def finish_parts(self, version: int) -> None:
        """Use the loaded parts as new weights.

        Args:
            version: version of the policy.

        Raises:
            RuntimeError: vLLM did not wake up, or did not reset its prefix cache.
        """
        self._llm.collective_rpc("finish_parts")
        self._finish_load(version)

    def _finish_load(self, version: int) -> None:
        if self._asleep:
            if not self._llm.wake_up(["kv_cache"]):
                raise RunError("vLLM did not wake up: it could not allocate all of its memory")
            self._asleep = False
        self._adapter = None  # vLLM removes adapters when base weights are loaded
        if self._images:  # vLLM's workers forget the features of images when weights are loaded, its scheduler does not
            self._engine.reset_encoder_cache()
        self._begin_version(version)

    def swap(self, adapter: str, version: int) -> None:
        """Load a LoRA adapter for all later requests.

        Args:
            adapter: directory in peft's format; it may be overwritten after the call.
            version: version of the policy.

        Raises:
            RuntimeError: vLLM rejected the adapter, or did not reset its prefix cache.
        """
        if not self._engine.add_lora(LoRARequest("policy", 1, adapter, load_inplace=True)):
            raise RunError(f"vLLM rejected the adapter in {adapter}")
        self._adapter = LoRARequest("policy", 1, adapter)
        self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        """Label later tokens with the version and reset the prefix cache.

        While requests are running, vLLM does not reset it: their keys and values remain, and new requests have another
        cache salt, so that they do not find those of old weights.
        """
        if not self.busy and not self._llm.reset_prefix_cache():
            raise RunError("vLLM kept the prefix cache of the old weights")
        self._version = version
        self._engine.set_weight_version(str(version))

    def first_lost(self, weights: dict[str, Any]) -> str | None:
        """Load the same weights again and check that all of them are read, and were there before.

        Returns:
            Name of the first parameter that is not read completely, or vLLM's name of one whose value changed; None if
            all are right, as far as known.
        """
        counts, changed, faults = zip(*self._llm.collective_rpc("trace_weights", kwargs=weights), strict=True)
        if fault := next(filter(None, faults), None):
            raise RunError(fault)
        slots = [Slot(**slot) for slot in weights["layout"]]
        # Tensor-parallel workers each read a part of a parameter, and replicate some parameters.
        complete = [sum(by_worker) >= slot.numel for slot, *by_worker in zip(slots, *counts, strict=True)]
        lost = next((slot.name for slot, is_read in zip(slots, complete, strict=True) if not is_read), None)
        return lost or next(filter(None, changed), None)

    def adapter_sums(self) -> list[float]:
        """Return the sums of absolute values of the adapters in the first worker; no request may be running.

        vLLM puts an adapter into its layers for the first request that uses it, which is made here.
        """
        self._add({"id": "adapter", "prompt": [0], "seed": 0, "sampling": {"max_tokens": 1}})
        while self.busy:
            deque(self.step(), maxlen=0)
        sums: list[float] = self._llm.collective_rpc("adapter_sums")[0]
        return sums

    def add(self, requests: list[dict[str, Any]]) -> None:
        """Queue requests; if one is rejected, abort all of them.

        Args:
            requests: dicts with ``id``, ``prompt``, ``seed`` and the fields of ``sampling``.
        """
        for index, request in enumerate(requests):
            try:
                self._add(request)
            except Exception:
                self._engine.abort_request([queued["id"] for queued in requests[:index]])
                raise

    def keep_images(self, new: Sequence[dict[str, Any]], dropped: Sequence[str]) -> None:
        """Keep images for later requests, and drop others of :class:`~.requests.SentImages`.

        Args:
            new: fields of images.
            dropped: SHA-256 of images that later requests do not use.
        """
        self._images |= {fields["sha256"]: EncodedImage.of_fields(fields) for fields in new}
        for sha256 in dropped:
            self._images.pop(sha256, None)  # a restarted process never had it

    def _add(self, request: dict[str, Any]) -> None:
        fields = dict(request["sampling"])
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        model = self._engine.vllm_config.model_config
        if model.return_sampling_mask and not (fields["temperature"] and fields["top_k"]):
            # vLLM then accepts no other requests. The one most likely token is the greedy choice.
            fields |= {"top_k": model.get_vocab_size()} if fields["temperature"] else {"temperature": 1.0, "top_k": 1}
            self._unlimited.add(request["id"])
        sampling = SamplingParams(
            **fields,
            seed=request["seed"],
            logprobs=0,
            detokenize=False,
            ignore_eos=True,  # stop only at the stop tokens of the request, not at the EOS token of config.json
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"], cache_salt=str(self._version))
        images = request.get("images")
        if images:
            prompt = TokensPrompt(
                prompt_token_ids=request["unexpanded"],
                cache_salt=str(self._version),
                multi_modal_data={"image": [self._decoded(sha256) for sha256 in images]},
                multi_modal_uuids={"image": images},
            )
        self._engine.add_request(request["id"], prompt, sampling, lora_request=self._adapter)
        if images:
            self._check_expanded(request)

    def _check_expanded(self, request: dict[str, Any]) -> None:
        """Raise if vLLM put other tokens in the place of images than the trainer.

        Raises:
            RuntimeError: the prompts differ; the request is aborted.
        """
        states = self._engine.output_processor.request_states.values()
        state = next(state for state in states if request["id"] in (state.request_id, state.external_req_id))
        try:
            check_expansion(request["prompt"], list(state.prompt_token_ids or ()), len(request["images"]))
        except RunError:
            self._engine.abort_request([state.request_id], internal=True)
            raise

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._engine.has_unfinished_requests()

    def step(self) -> Iterator[dict[str, Any]]:
        """Advance all requests by one token and yield the finished completions."""
        for output in self._engine.step():
            if output.finished:
                yield self._completion(output)

    def cut(self) -> Iterator[dict[str, Any]]:
        """End the running requests that have tokens, and yield their completions, which are truncated."""
        states = list(self._engine.output_processor.request_states.values())
        started = [state for state in states if state.detokenizer.num_output_tokens()]
        outputs = [state.make_request_output([], None, FinishReason.LENGTH, None) for state in started]
        self._engine.abort_request([state.request_id for state in started], internal=True)
        yield from map(self._completion, outputs)

    def _completion(self, output: Any) -> dict[str, Any]:
        """Return the completion in a finished output of vLLM as a message."""
        sample = output.outputs[0]
        first, *later = sample.weight_versions
        echoed = [] if output.prompt_logprobs is None else output.prompt_token_ids[1:]
        echoed_logprobs = output.prompt_logprobs.logprobs if echoed else []
        message = {
            "id": output.request_id,
            "token_ids": [*echoed, *sample.token_ids],
            "logprobs": [float(value) for value in (*echoed_logprobs, *sample.logprobs.logprobs)],
            "finish_reason": "length" if sample.finish_reason == "length" else "stop",
            "policy_version": int(first.version),
            "later_versions": [[span.start, int(span.version)] for span in later],
        }
        if output.request_id in self._unlimited:
            self._unlimited.remove(output.request_id)
        elif sample.sampling_mask is not None:
            masks = sample.sampling_mask.token_ids
            message["allowed"] = [list(map(len, masks)), [int(token) for mask in masks for token in mask]]
        if sample.routed_experts is not None:
            experts = sample.routed_experts.astype("int16")
            message["experts"] = {"shape": experts.shape, "bytes": b64encode(experts.tobytes()).decode()}
        return message
